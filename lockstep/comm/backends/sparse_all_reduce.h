#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace lockstep::backends {

/// Sums or averages the ranks' sparse tensors, of which `tensors` holds this rank's, in the order
/// of the ranks. They hold different numbers of elements: all gather how many, then indices and
/// values padded to the most. `gather(output, input)` is a blocking all_gather_into_tensor. Throws
/// UsageError for anything but one sparse tensor of the CPU and for other reductions.
void all_reduce_sparse(std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op, int size,
                       const std::function<void(at::Tensor& output, at::Tensor& input)>& gather);

}  // namespace lockstep::backends
