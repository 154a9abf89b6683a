#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

/// Whether no element is NaN or infinite. Each tensor is read once. Undefined tensors are passed
/// by. Sparse tensors count by their values.
bool all_finite(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
