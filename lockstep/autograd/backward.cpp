#include "lockstep/autograd/backward.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "lockstep/autograd/graph_walk.h"

namespace lockstep {

void backward(const at::Tensor& loss, const at::Tensor& gradient) {
  // Held: a hook may let go of the caller's tensor.
  const auto root = loss.defined() ? loss.grad_fn() : nullptr;
  detail::GraphWalk walk;
  if (!root || !detail::may_walk(loss, gradient, *root) || !walk.explore(root.get())) {
    loss.backward(gradient);
    return;
  }
  detail::WalkingGuard guard;
  walk.run(loss.output_nr(), gradient.defined() ? gradient : detail::ones_of(loss));
  guard.call_back();
}

bool walks_backward(const at::Tensor& loss) {
  const auto& root = loss.grad_fn();
  return root && detail::may_walk(loss, {}, *root) && detail::GraphWalk().explore(root.get());
}

SplitBackward::SplitBackward(const at::Tensor& output, const at::Tensor& gradient,
                             const at::Tensor& input)
    : output_(output), gradient_(gradient) {
  if (!input.defined() || !input.requires_grad()) return;
  const auto leaf = torch::autograd::impl::grad_accumulator(input);
  const auto root = output.grad_fn();
  auto walk = std::make_unique<detail::GraphWalk>();
  if (!root || !detail::may_walk(output, gradient, *root) || !walk->explore(root.get()) ||
      !walk->can_be_halved()) {
    backward(output, gradient);
    output_ = at::Tensor();
    return;
  }
  const detail::WalkingGuard guard;
  const bool leads = walk->run_to(leaf.get(), output.output_nr(),
                                  gradient.defined() ? gradient : detail::ones_of(output));
  if (leads) walk_ = std::move(walk);
}

SplitBackward::~SplitBackward() = default;
SplitBackward::SplitBackward(SplitBackward&&) noexcept = default;
SplitBackward& SplitBackward::operator=(SplitBackward&&) noexcept = default;

void SplitBackward::finish() {
  const at::Tensor output = std::exchange(output_, {});
  if (!output.defined()) return;
  const auto walk = std::exchange(walk_, nullptr);
  if (!walk) {
    backward(output, gradient_);
    return;
  }
  const detail::WalkingGuard guard;
  walk->run_rest();
}

}  // namespace lockstep
