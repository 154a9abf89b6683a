#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// at::linear(x, weight, bias) as one node of the autograd graph, with the same bits in forward and
/// backward.
///
/// LibTorch records two nodes for it, a transposition and addmm. For a small layer their overhead
/// costs more than the products. The single node is used on the CPU when a graph is recorded, for
/// contiguous `x` [N, in], `weight` [out, in] and `bias` [out]. All are float32 or all are float64.
/// Everything else is passed to at::linear: no bias, more dimensions, other dtypes and devices,
/// autocast, forward-mode gradients. Double backward works.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// Whether linear would use the single node.
bool linear_is_one_node(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep
