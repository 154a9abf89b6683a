#pragma once

#include <c10/core/Device.h>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/pipeline/stage_tensors.h"

namespace lockstep::detail {

/// lockstep::clip_grad_norm over the parameters of all stages, each counted once, with the bits
/// that one process gets. A collective of `pipeline`.
double clip_stage_gradients(const StageTensors& tensors, const ProcessGroup& pipeline,
                            c10::Device device, double max_norm);

}  // namespace lockstep::detail
