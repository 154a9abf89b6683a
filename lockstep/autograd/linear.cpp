#include "lockstep/autograd/linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>

#include "lockstep/autograd/make_node.h"

namespace lockstep {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// The products are those of addmm's own backward for a transposed weight. So is the order of the
/// inputs, bias first: buckets follow the order in which gradients come, and the order in which
/// Gloo adds three ranks' values follows their place in the bucket.
class LinearBackward : public Node {
 public:
  LinearBackward(const at::Tensor& x, const at::Tensor& weight)
      : x_(x, /*is_output=*/false), weight_(weight, /*is_output=*/false) {}

  std::string name() const override { return "LinearBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
  }

 protected:
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    variable_list result(3);
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return result;
    const at::Tensor x = x_.unpack(), weight = weight_.unpack();
    // Of a row each: the engine sums what was broadcast.
    if (task_should_compute_output(0)) result[0] = gradient;
    if (task_should_compute_output(1)) result[1] = gradient.mm(weight);
    if (task_should_compute_output(2)) result[2] = gradient.t().mm(x);
    return result;
  }

 private:
  SavedVariable x_;
  SavedVariable weight_;
};

bool is_plain(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         tensor.scalar_type() == dtype && tensor.is_contiguous() &&
         !torch::autograd::isFwGradDefined(tensor);
}

}  // namespace

bool linear_is_one_node(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!bias.defined() || x.dim() != 2 || weight.dim() != 2 || bias.dim() != 1) return false;
  const at::ScalarType dtype = x.scalar_type();
  // A single row or column may count as transposed, for which addmm's backward multiplies in
  // another order.
  return (dtype == at::kFloat || dtype == at::kDouble) && x.size(0) > 1 && x.size(1) > 1 &&
         x.size(1) == weight.size(1) && bias.size(0) == weight.size(0) && is_plain(x, dtype) &&
         is_plain(weight, dtype) && is_plain(bias, dtype) &&
         torch::autograd::compute_requires_grad(x, weight, bias) &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (!linear_is_one_node(x, weight, bias)) return at::linear(x, weight, bias);
  const auto node = make_node<LinearBackward>(x, weight);
  node->set_next_edges(torch::autograd::collect_next_edges(bias, x, weight));
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    output = at::addmm(bias, x, weight.t());
  }
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace lockstep
