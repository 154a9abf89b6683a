#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "lockstep/optim/optim.h"

namespace lockstep {

/// For optimizers whose kernels know nothing of a scaler: divides the gradients by
/// `scale.grad_scale`. False, and nothing is divided, when `scale.found_inf` forbids the step.
bool unscale_gradients(const std::vector<at::Tensor>& parameters, const StepScale& scale);

}  // namespace lockstep
