#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

/// at::linear(x, weight, bias), to its bits, forward and backward, as one node of the graph.
///
/// LibTorch makes two nodes of it, a transposition and addmm. For a small layer these, and what
/// backward does for them, cost more than the products. This is for rows on the CPU that record a
/// graph: `x` [N, in] and `weight` [out, in], contiguous, with a `bias` [out]. All are float32 or
/// all are float64. Everything else goes to at::linear: no bias, more dimensions, other dtypes and
/// devices, autocast, forward-mode gradients. Gradients of gradients work.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// Whether linear would take the short way.
bool linear_is_one_node(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace lockstep
