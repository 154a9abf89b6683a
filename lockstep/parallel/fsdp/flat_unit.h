#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel/fsdp/unit_plan.h"

namespace lockstep::detail {

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
