#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/state_dict.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/tensor_shard.h"
#include "lockstep/parallel/flat_unit.h"

namespace torch::nn {
class Module;
}

namespace lockstep::detail {

/// Which part of each of a whole state's tensors this rank has.
struct StateSpread {
  /// The ranks that have the whole together. Null: this rank alone has it.
  ProcessGroup group;
  /// By the whole state's indices. Only their shape, strides, dtype and device are looked at.
  std::vector<at::Tensor> parameters;
  /// Of each: all of it (replicated), a run (sharded) or nothing (absent).
  std::vector<Part> parts;
  /// Ranks keep vectors. False: of a parameter that they have whole, tensors of its shape.
  bool always_vectors = false;
};

/// The tensors of which ranks have `shards`, on the CPU of rank `to`, in the order in which they
/// come; empty on the others. Throws TimeoutError where a rank does not come. A collective.
StateDict gather_shards(const ProcessGroup& group, const std::vector<TensorShard>& shards, int to);

/// The state of an optimizer of which each rank has one of its own parameters.
struct SpreadOptimizer {
  /// Of an own parameter that counts as none of the whole's.
  static constexpr size_t kNone = SIZE_MAX;

  StateSpread spread;
  std::vector<size_t> indices;  ///< Own parameter i is the whole's `indices[i]`.
  StateDict frozen = {};        ///< What a loaded state has of parameters that are not trained.

  /// `own` is the state of this rank's optimizer. The whole state, on the CPU of rank `to`; empty
  /// on the others. A collective.
  StateDict gather(const StateDict& own, int to = 0) const;
  /// See Strategy::optimizer_shards and Strategy::needed_of_optimizer.
  std::vector<TensorShard> shards(const StateDict& own) const;
  std::map<size_t, std::vector<TensorBox>> needed() const;
  /// This rank's part of a whole state: for its optimizer, and for `frozen`. Throws
  /// CheckpointError, which `what` begins, where the state does not fit the parameters.
  std::pair<StateDict, StateDict> own_part(const StateDict& whole, const std::string& what) const;
};

/// The state of a module of whose parameters each rank has a part. Buffers are whole on all ranks.
struct SpreadModel {
  torch::nn::Module& module;
  std::vector<at::Tensor> tensors;  ///< Its parameters and then its buffers, each once.
  size_t num_parameters;
  StateSpread spread;  ///< Of `tensors`: which ranks give what of the whole.
  /// This rank's part of a tensor: a vector, or the whole in its shape.
  std::function<at::Tensor(size_t tensor)> values;
  /// Takes this rank's part of a whole parameter.
  std::function<void(size_t parameter, const at::Tensor& whole)> store;

  /// By the names of the module's state_dict, on the CPU of rank 0; empty on the others. A
  /// collective.
  StateDict gather() const;
  /// Throws CheckpointError, which `source` begins, where the state does not fit, and then changes
  /// nothing.
  void load(const StateDict& whole, const std::string& source) const;
  /// The same of shards that together are the whole. Tensors are taken one after the other.
  void load(const std::vector<TensorShard>& given, const std::string& source) const;
  /// See Strategy::model_shards and Strategy::needed_of_model.
  std::vector<TensorShard> shards() const;
  std::map<std::string, std::vector<TensorBox>> needed() const;

 private:
  /// Calls `f(name, index)` for each name of a tensor.
  void each(const std::function<void(const std::string& name, size_t index)>& f) const;
  void load_each(
      const std::function<at::Tensor(const std::string& name, size_t index)>& whole) const;
};

}  // namespace lockstep::detail
