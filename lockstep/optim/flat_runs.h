#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

/// The same elements in fewer tensors, for operations that treat every element alike. Tensors that
/// lie side by side in memory become one vector that shares their memory. Gradients that are views
/// of DistributedDataParallel's buckets lie so. What is not dense stays as it is. Tensors must not
/// overlap.
std::vector<at::Tensor> flat_runs(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
