#include "lockstep/parallel/gradient_place.h"

#include <torch/csrc/distributed/autograd/context/context.h>

#include "lockstep/base/error.h"

namespace lockstep::detail {

namespace native = torch::distributed::autograd;

GradientPlace::GradientPlace() = default;
GradientPlace::~GradientPlace() = default;
GradientPlace::GradientPlace(GradientPlace&&) noexcept = default;
GradientPlace& GradientPlace::operator=(GradientPlace&&) noexcept = default;

GradientPlace GradientPlace::of_this_backward() {
  GradientPlace place;
  place.context_ = native::ThreadLocalDistAutogradContext::getContextPtr();
  return place;
}

bool GradientPlace::is_of_this_backward() const {
  return context_ == native::ThreadLocalDistAutogradContext::getContextPtr();
}

void GradientPlace::visit_in_context(const at::Tensor& parameter, const std::string& name,
                                     const std::function<void(at::Tensor&)>& change) const {
  bool found = false;
  try {
    context_->runGradCallbackForVariable(parameter, [&](at::Tensor& gradient) {
      found = true;
      change(gradient);
      return true;
    });
  } catch (const c10::Error&) {
    if (found) throw;
    throw UsageError("a backward of distributed autograd gave " + name + " no gradient",
                     "in a context every parameter must take part in the loss");
  }
}

void refuse_distributed_autograd(const std::string& what) {
  if (!native::ThreadLocalDistAutogradContext::getContextPtr()) return;
  throw UsageError(what + ": its gradients lie in an rpc::AutogradContext, where it does not look",
                   "call backward of the loss itself, or take DistributedDataParallel");
}

}  // namespace lockstep::detail
