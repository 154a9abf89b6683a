#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace lockstep::detail {

/// Where a backward leaves the parameters' gradients: in `grad()`, or, for one of distributed
/// autograd, in its context.
class GradientPlace {
 public:
  /// Of `grad()`.
  GradientPlace();
  ~GradientPlace();
  GradientPlace(GradientPlace&&) noexcept;
  GradientPlace& operator=(GradientPlace&&) noexcept;
  /// Of the backward that runs on this thread, from a hook of it.
  static GradientPlace of_this_backward();

  bool is_context() const { return context_ != nullptr; }
  bool is_of_this_backward() const;
  /// Calls `change` with the gradient of the parameter of that name, which it may change or
  /// replace. In a context there is one from the moment at which the parameter's hooks run. Throws
  /// UsageError where a context has none.
  template <class Change>
  void visit(const at::Tensor& parameter, const std::string& name, Change&& change) const {
    if (!is_context()) return change(parameter.mutable_grad());
    visit_in_context(parameter, name, change);
  }

 private:
  void visit_in_context(const at::Tensor& parameter, const std::string& name,
                        const std::function<void(at::Tensor&)>& change) const;

  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
};

/// From a hook of a backward: throws UsageError when it is one of distributed autograd, whose
/// gradients `what` does not find.
void refuse_distributed_autograd(const std::string& what);

}  // namespace lockstep::detail
