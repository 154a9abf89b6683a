#pragma once

// What the ranks are to call: made of a seed, alike on every rank.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::fuzz {

/// What the driver tells the ranks.
struct Job {
  uint64_t seed = 0;
  std::string backend = "shm";
  std::string placement = "aa";  ///< A letter for each rank: its host.
  double seconds = 0;            ///< The program's length; 0: as many blocks as `blocks` says.
  int64_t blocks = 0;
  double timeout = 30;      ///< Of the group, in seconds.
  bool mismatches = false;  ///< Calls that differ are part of the program.
  bool detail = false;      ///< All calls are compared, over any backend.
  int64_t large = 400'000;  ///< The most elements of a tensor.
  std::string ending = {};  ///< How one rank goes, see `Ending`; empty: none does.

  int size() const { return static_cast<int>(placement.size()); }
};
Job parse_job(const std::string& json);

/// What carries a group's calls; it decides which tensors and dtypes may be used.
enum class Carrier { shm, hierarchical, gloo, mpi };
Carrier carrier_of(const Job& job, const std::vector<int>& members);

enum class Kind {
  all_reduce,
  all_reduce_coalesced,
  reduce,
  broadcast,
  all_gather,
  all_gather_into_tensor,
  gather,
  scatter,
  reduce_scatter,
  reduce_scatter_tensor,
  all_to_all,
  all_to_all_single,
  barrier,
  symmetric,    ///< all_reduce of a part of symmetric memory.
  exchange,     ///< Messages between any ranks.
  collect_any,  ///< One rank receives from any.
  objects,      ///< JSON of any size.
  monitored_barrier,
  form_group,  ///< new_group or split, and an all_reduce in what comes of it.
};
std::string name_of(Kind kind);
bool reduces(Kind kind);
bool has_root(Kind kind);
bool is_collective(Kind kind);  ///< Of tensors, or a barrier: what the ranks' checks compare.
bool is_message(Kind kind);

/// One call of every rank of a group, or some messages between them.
struct Step {
  uint64_t key = 0;  ///< Decides the values, and each rank's layouts and ways to wait.
  Kind kind = Kind::barrier;
  at::ScalarType dtype = at::kFloat;
  ReduceOp reduction = ReduceOp::sum;
  int root = 0;  ///< A rank of the group.
  std::vector<int64_t> shape;
  int tensors = 1;        ///< all_reduce_coalesced: how many.
  bool repeated = false;  ///< Values are the same along dimension 0: expanded inputs are possible.
  bool splits = false;    ///< all_to_all_single: cut by lists.
  int64_t extra = 0;      ///< all_to_all: more rows for everyone.
  int tag = 0;
};
std::string describe(const Step& step);

/// What a group's calls may consist of.
bool has_reduction(Carrier carrier, at::ScalarType dtype, ReduceOp reduction);
const std::vector<at::ScalarType>& dtypes_of(Carrier carrier, Kind kind);
const std::vector<ReduceOp>& reductions();

/// A random step for a group. `unique` makes its tag one that no other step uses.
Step make_step(const Job& job, Carrier carrier, int group_size, uint64_t key, int unique);

struct BlockStep {
  int group = 0;
  uint64_t key = 0;
};
/// Steps that are under way together. `deviant`: a rank of the default group whose call at
/// `mismatch` differs.
struct Block {
  std::vector<BlockStep> steps;
  int mismatch = -1;
  int deviant = -1;
  bool barrier = false;  ///< Of all ranks, at the end.
};
Block make_block(const Job& job, const std::vector<std::vector<int>>& groups, int64_t number);

/// How groups are made of the default one.
struct GroupPlan {
  bool by_split = false;
  std::vector<int> ranks;   ///< new_group.
  std::vector<int> colors;  ///< split: of every rank.
  std::vector<int> keys;
  /// What comes of it: the ranks of each group, in its order.
  std::vector<std::vector<int>> groups() const;
};
GroupPlan make_group_plan(KeyedRandom& random, int size);

template <class T>
void shuffle(std::vector<T>& values, KeyedRandom& random) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.below(i)]);
}
template <class T>
T any_of(const std::vector<T>& values, KeyedRandom& random) {
  return values[random.below(values.size())];
}

}  // namespace lockstep::fuzz
