#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// Batch norm in training with the mean and variance of all ranks' batches: what at::batch_norm is
/// for one. `x` is [N, C, ...], of any memory format; N may differ between ranks, and be 0. The
/// other tensors are [C] and may be undefined. Updates the running statistics, with the unbiased
/// variance. The sums are made in double, in the ranks' order, to the same bits on all ranks.
/// Backward is a collective too. Gradients of `weight` and `bias` are this rank's own parts, as
/// DistributedDataParallel expects them. Throws UsageError for one value per channel in all.
at::Tensor sync_batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                           const at::Tensor& running_mean, const at::Tensor& running_var,
                           double momentum, double eps, const ProcessGroup& group);

}  // namespace lockstep::detail
