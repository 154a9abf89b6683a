#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/pipeline/stage_tensors.h"
#include "lockstep/parallel/spread_state.h"

namespace lockstep::detail {

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

  /// Copies what this rank has. Throws CheckpointError where the whole state does not fit.
  void load_model(const StateDict& whole) const;
  /// The part of a whole optimizer's state for this rank's parameters.
  StateDict own_part(const StateDict& whole) const;

 private:
  StateSpread spread() const;

  torch::nn::Module& module_;
  const StageTensors& tensors_;
  ProcessGroup pipeline_;
};

}  // namespace lockstep::detail
