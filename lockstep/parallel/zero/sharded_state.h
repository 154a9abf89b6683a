#pragma once

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/zero/parameter_shards.h"

namespace lockstep::detail {

/// The whole optimizer's state, on the CPU of rank `to`, from what each rank's optimizer has of
/// `shards.parts()`, and from what rank 0 keeps of `frozen` parameters. Empty on the others. Throws
/// TimeoutError where a rank does not come. A collective. `what` names the caller in messages.
StateDict gather_state(const ParameterShards& shards, const StateDict& local,
                       const StateDict& frozen, int to, const std::string& what);

struct CutState {
  StateDict local;   ///< What this rank's optimizer has.
  StateDict frozen;  ///< On rank 0, of parameters that are not trained: whole, to be kept.
};
/// Throws CheckpointError where the whole state does not fit the parameters.
CutState cut_state(const ParameterShards& shards, const StateDict& whole,
                   const std::string& optimizer);

}  // namespace lockstep::detail
