#pragma once

#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

/// A hook after a node that asks nothing of LibTorch's engine (no Engine::queue_callback), so that
/// `backward` may call it without one.
class PlainPostHook : public torch::autograd::FunctionPostHook {};

/// The same of a leaf's hook that runs when a gradient has been added, whichever node adds it.
class PlainAccumulateHook : public torch::autograd::PostAccumulateGradHook {};

/// Runs `callback` when the backward of this thread that is under way has run all of its nodes,
/// before it returns to its caller. What it throws leaves backward. It is dropped where backward
/// fails. Of backwards within each other (NestedBackward) the outermost counts. For hooks: throws
/// where no backward is under way.
void after_backward(std::function<void()> callback);

/// A number that this process gives to no other backward: of the one that runs on this thread, or
/// of the outermost. For hooks.
int64_t current_backward();

/// Whether the backward that runs on this thread keeps its graph for another one, as our own walk
/// does not. For hooks.
bool keeps_graph();

/// While it lives, a backward that a node runs on this thread is a part of that node's own.
class NestedBackward {
 public:
  NestedBackward();
  ~NestedBackward();
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;
  /// Ends it. What `after_backward` was given meanwhile goes on to the node's own backward.
  void finish();

 private:
  friend void after_backward(std::function<void()> callback);
  friend int64_t current_backward();

  const int64_t number_;
  std::vector<std::function<void()>> callbacks_;
  NestedBackward* const outer_;
};

}  // namespace lockstep
