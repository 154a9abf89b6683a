#include "lockstep/optim/unscale.h"

#include <c10/core/GradMode.h>

namespace lockstep {

bool unscale_gradients(const std::vector<at::Tensor>& parameters, const StepScale& scale) {
  if (scale.found_inf.defined() && scale.found_inf.item<double>() != 0) return false;
  if (!scale.grad_scale.defined()) return true;
  const c10::AutoGradMode no_grad(false);
  const at::Tensor factor = scale.grad_scale.reshape({});
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined()) gradient.div_(factor.to(gradient.device()));
  }
  return true;
}

}  // namespace lockstep
