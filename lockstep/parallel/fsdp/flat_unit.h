#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel/module_state.h"

namespace lockstep::detail {

/// Parameters that are gathered, freed and reduced together: those of one module.
struct PlannedUnit {
  std::string name;                     ///< Of the module; "" is the whole.
  std::vector<NamedTensor> parameters;  ///< Each tensor once, in the module's order.
};

/// Cuts a module into units. What belongs to no other unit is the first unit, that of the whole.
///
/// `names` are the full names of the modules that are units. "h.*" stands for all children of h. A
/// unit within a unit is one of its own. Modules without parameters are left out. Throws UsageError
/// for a name that the module does not have, with the nearest.
///
/// Without `names` the size decides. A module of at least `min_elements` is a unit, unless there is
/// a list in it (Sequential, ModuleList, ModuleDict, numbered children) with two such modules or
/// more: then it is cut further. So the blocks of a transformer are units, and small layers stay
/// together.
std::vector<PlannedUnit> plan_units(const torch::nn::Module& module,
                                    const std::vector<std::string>& names, int64_t min_elements);

/// Where shards and parameters begin: at multiples of so many elements. It is a multiple of the
/// elements in every vector register that LibTorch's kernels use. An optimizer's kernels round the
/// elements after a tensor's last full vector otherwise. A piece that is cut so has the bits that
/// it would have in the whole parameter.
inline constexpr int64_t kShardBlock = 16;

struct FlatParameter {
  std::string name;
  at::Tensor tensor;   ///< The module's own.
  size_t index = 0;    ///< In the module's parameters(), each counted once.
  int64_t offset = 0;  ///< Of its first element in the unit.
};

/// A unit's parameters of one dtype, one after the other, and cut into one shard per rank. What is
/// added at the end fills the last shard. There is at least one such element.
struct FlatUnit {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<FlatParameter> parameters;
  int64_t shard_size = 0;  ///< Elements of each rank's shard.
};

/// What of one parameter lies in one rank's shard: a run of it in the order of memory.
struct Piece {
  size_t unit = 0;
  size_t parameter = 0;      ///< In the unit.
  int64_t begin = 0;         ///< In the parameter.
  int64_t size = 0;          ///< At least 1.
  int64_t shard_offset = 0;  ///< In the rank's shard.
};

/// Gives each parameter its place. A unit with parameters of several dtypes becomes one for each.
std::vector<FlatUnit> lay_out(const std::vector<PlannedUnit>& planned,
                              const torch::nn::Module& module, int ranks);
/// All pieces of a rank, in the order of units and parameters.
std::vector<Piece> pieces_of(const std::vector<FlatUnit>& units, int rank);

}  // namespace lockstep::detail
