#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

struct ClipOptions {
  /// 1 or more, or infinity for the largest absolute value. PyTorch's default.
  double norm_type = 2;
  /// Throw NumericError, on all ranks, where the norm is NaN or infinite. PyTorch's default.
  bool error_if_nonfinite = false;
};

/// clip_grad_norm where each rank of `group` has its own part of the model's gradients: shards of
/// ZeRO or FSDP, the stages of a pipeline. Scales them, on all ranks alike, so that the norm over
/// all of them is at most `max_norm`. Returns the norm before, the same bits on all ranks. A
/// gradient must be on one rank only, or it counts several times.
///
/// `gradients`: this rank's, dense, of any shapes and floating-point dtypes. There may be none. A
/// norm that is NaN or infinite spoils all ranks' gradients, as in Python, unless `options` make it
/// an error. The sum over ranks is in float64. So the norm differs from that of one process by its
/// rounding only. A collective.
double clip_grad_norm(const std::vector<at::Tensor>& gradients, double max_norm,
                      const ProcessGroup& group, const ClipOptions& options = {});

}  // namespace lockstep
