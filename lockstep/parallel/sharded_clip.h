#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// lockstep::clip_grad_norm where each rank of `group` has its own part of the model's gradients,
/// as shards of ZeRO or FSDP: dense, of any shapes and floating-point dtypes, or none. A gradient
/// must be on one rank only, or it counts several times. The norm is the same bits on all ranks. It
/// differs from that of one process by its rounding, as the sum over ranks is in float64. A
/// collective.
double clip_shards(const std::vector<at::Tensor>& gradients, double max_norm,
                   const ProcessGroup& group);

}  // namespace lockstep::detail
