#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <vector>

#include "lockstep/autograd/backward_hook.h"

namespace lockstep::detail {

/// The nodes that a backward from one root runs, each after all that give it a gradient. The order
/// and the bits are those of LibTorch's engine.
class GraphWalk {
 public:
  using Node = torch::autograd::Node;

  /// False when there is something in the graph that only LibTorch's engine knows.
  bool explore(Node* root);
  /// Runs all. `gradient` is for the root's `input`-th output of forward.
  void run(uint32_t input, at::Tensor gradient);

  /// The same in two halves: `run_to` runs what leads to `leaf`, `run_rest` all else. A node of
  /// both halves runs twice, each time for the half's edges only. `run_to` gives false, and has
  /// done nothing, when nothing leads there. Each half is run once.
  bool run_to(const Node* leaf, uint32_t input, at::Tensor gradient);
  /// Whether no node would mind that.
  bool can_be_halved() const;
  void run_rest();

 private:
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  struct Step {
    Node* node;  ///< Held by the root, which its edges hold.
    size_t first_target = 0;
    uint32_t awaited = 0;  ///< Gradients that are still to come.
    torch::autograd::variable_list inputs = {};
    bool leads = false;     ///< To the leaf of `run_to`.
    bool has_rest = false;  ///< It leads there, and has edges that do not.
  };

  /// The engine's order: the node that forward made last comes first, and leaves at once.
  struct Ready {
    uint64_t age;
    uint32_t step;
    bool operator<(const Ready& other) const { return age < other.age; }
  };

  uint32_t visit(Node* node);
  void mark_leading(const Node* leaf);
  std::vector<uint32_t> from_root_down() const;
  torch::autograd::variable_list call(Step& step);
  torch::autograd::variable_list call_half(Step& step, bool leading);
  template <class Call, class Wanted>
  void drain(const Call& call, const Wanted& wanted);
  void push(uint32_t step);
  void give_to(uint32_t target, uint32_t input, at::Tensor&& gradient);

  std::vector<Step> steps_;
  std::vector<uint32_t> targets_;  ///< Of all steps' edges, indices into `steps_`.
  std::priority_queue<Ready> ready_;
  ska::flat_hash_map<Node*, uint32_t> index_;
};

/// Whether a walk may begin: this thread's modes, the loss and its gradient are as it wants them.
bool may_walk(const at::Tensor& loss, const at::Tensor& gradient, torch::autograd::Node& root);

/// While it lives this thread walks a graph: without recording one, and so that a backward within
/// goes to the engine.
class WalkingGuard {
 public:
  WalkingGuard();
  ~WalkingGuard();
  WalkingGuard(const WalkingGuard&) = delete;
  WalkingGuard& operator=(const WalkingGuard&) = delete;
  /// Calls what `after_backward` was given since then. For the end of a backward.
  void call_back();

 private:
  friend void lockstep::after_backward(std::function<void()> callback);
  friend int64_t lockstep::current_backward();

  std::vector<std::function<void()>> callbacks_;
  const int64_t number_;
  const c10::AutoGradMode no_graph_{false};
};

/// The gradient of a loss by itself.
at::Tensor ones_of(const at::Tensor& loss);

}  // namespace lockstep::detail
