#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/spread_state.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

/// A tensor of the whole module and the stages that use it.
struct StageTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<int> ranks;  ///< Of the pipeline, ascending; several: it is tied.
  int owner() const { return ranks.front(); }
  bool is_on(int rank) const;
};

/// All parameters and buffers of a module, by what ranks of the pipeline have them.
class StageTensors {
 public:
  /// `starts` are the first layers of the stages, which go round the ranks. Throws UsageError for a
  /// parameter that no layer has.
  StageTensors(torch::nn::Module& module, const std::vector<Layer>& layers,
               const std::vector<size_t>& starts, int rank, int num_ranks);

  /// Each once, in the module's order: the numbers of an optimizer's state.
  const std::vector<StageTensor>& parameters() const { return parameters_; }
  const std::vector<StageTensor>& buffers() const { return buffers_; }
  /// The numbers of the parameters that this rank has.
  const std::vector<size_t>& own() const { return own_; }
  std::vector<at::Tensor> own_parameters() const;
  /// Parameters of this rank that another one has too.
  bool has_tied() const;

  /// Gives the memory of other ranks' parameters back. They keep their shape and are NaN.
  void free_others();

 private:
  int rank_;
  std::vector<StageTensor> parameters_;
  std::vector<StageTensor> buffers_;
  std::vector<size_t> own_;
};

/// The whole state of a model of which each rank of `pipeline` has stages.
///
/// The gathers are collectives of `pipeline`. Rank 0 gets all, the others nothing. Throws
/// CommErrors, such as a TimeoutError that names a rank that does not take part.
class StageState {
 public:
  StageState(torch::nn::Module& module, const StageTensors& tensors, ProcessGroup pipeline);

  /// By the names of the module's state_dict.
  StateDict gather_model() const;
  /// `own` is the state of the optimizer of this rank's parameters, in their order.
  StateDict gather_optimizer(const StateDict& own) const;

  /// See Strategy::model_shards and what follows it there.
  std::vector<TensorShard> model_shards() const;
  std::vector<TensorShard> optimizer_shards(const StateDict& own) const;
  std::map<std::string, std::vector<TensorBox>> needed_of_model() const;
  std::map<size_t, std::vector<TensorBox>> needed_of_optimizer() const;

  /// Copies what this rank has. Throws CheckpointError where the whole state does not fit.
  void load_model(const StateDict& whole) const;
  /// The part of a whole optimizer's state for this rank's parameters.
  StateDict own_part(const StateDict& whole) const;

 private:
  StateSpread spread() const;
  StateDict local_state(const StateDict& own) const;

  torch::nn::Module& module_;
  const StageTensors& tensors_;
  ProcessGroup pipeline_;
};

}  // namespace lockstep::detail
