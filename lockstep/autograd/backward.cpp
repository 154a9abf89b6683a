#include "lockstep/autograd/backward.h"

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

}  // namespace lockstep
