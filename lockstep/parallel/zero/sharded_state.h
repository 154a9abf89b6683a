#pragma once

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/zero/parameter_shards.h"

namespace lockstep::detail {

/// The whole optimizer's state, on the CPU of rank `to`, from what each rank's optimizer has of
/// `shards.parts()`. Empty on the others. Throws TimeoutError where a rank does not come. A
/// collective. `what` names the caller in messages.
OptimizerState gather_state(const ParameterShards& shards, const OptimizerState& local, int to,
                            const std::string& what);

/// What this rank's optimizer has of a whole state. Throws CheckpointError where the state does not
/// fit the parameters.
OptimizerState cut_state(const ParameterShards& shards, const OptimizerState& whole,
                         const std::string& optimizer);

}  // namespace lockstep::detail
