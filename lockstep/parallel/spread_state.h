#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "lockstep/base/state_dict.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/tensor_shard.h"

namespace lockstep::detail {

/// Elements [begin, end) of a parameter, in the order of its memory.
struct Part {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

/// How the state of a whole optimizer is spread over the ranks of a group.
struct StateSpread {
  ProcessGroup group;
  /// By the whole state's indices. Only their shape, strides, dtype and device are looked at.
  std::vector<at::Tensor> parameters;
  /// What a rank keeps of the state of a parameter; may be nothing.
  std::function<Part(int rank, size_t parameter)> part;
  /// Ranks keep vectors. False: of a parameter that they have whole, tensors of its shape.
  bool always_vectors = false;
};

/// The whole state, on the CPU of rank `to`; empty on the others. `local` is what this rank has, by
/// the whole's indices. What it has of parameters of which it keeps no part is left out. Throws
/// TimeoutError where a rank does not come. `what` names the caller in messages. A collective.
StateDict gather_state(const StateSpread& spread, const StateDict& local, int to,
                       const std::string& what);

/// What this rank keeps of a whole state, by the whole's indices. Throws CheckpointError, which
/// `what` begins, where it does not fit the parameters.
StateDict cut_state(const StateSpread& spread, const StateDict& whole, const std::string& what);

/// What this rank has of a whole state: see Strategy::optimizer_shards. `local` is as for
/// `gather_state`.
std::vector<TensorShard> state_shards(const StateSpread& spread, const StateDict& local);
/// What cut_state looks at: see Strategy::needed_of_optimizer.
std::map<size_t, std::vector<TensorBox>> needed_state(const StateSpread& spread);

/// The state of an optimizer whose parameter i is the whole's `indices[i]`, by the whole's indices.
StateDict by_whole_index(const StateDict& own, const std::vector<size_t>& indices);
/// The other way. What the optimizer has no parameter for is left out.
StateDict by_own_index(const StateDict& whole, const std::vector<size_t>& indices);

}  // namespace lockstep::detail
