#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lockstep::detail {

/// The 2-norm of all gradients that are clipped together, from those of this process's gradients:
/// `norms[i]` is that of the gradient at `places[i]`. There may be none.
using TotalNorm = std::function<at::Tensor(const std::vector<at::Tensor>& norms,
                                           const std::vector<size_t>& places)>;

/// The gradients of those parameters that have one.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

/// What clip_grad_norm and the strategies do with dense gradients, or the values of sparse ones.
double clip_gradients(const std::vector<at::Tensor>& gradients, double max_norm,
                      const TotalNorm& total_norm);

}  // namespace lockstep::detail
