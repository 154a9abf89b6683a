#include "lockstep/autograd/backward.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "lockstep/autograd/backward_hook.h"
#include "lockstep/autograd/make_node.h"

namespace lockstep::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Whether the engine would pass the gradient on as it is. The dtype that it wants is the leaf's
/// own unless the user has set another (`Tensor::set_grad_dtype`).
bool fits(const InputMetadata& expected, const at::Tensor& gradient) {
  return gradient.device() == expected.device() &&
         gradient.scalar_type() == expected.grad_dtype() &&
         gradient.layout() == expected.layout() && expected.is_same_shape(gradient);
}

bool plain_accumulation(Node& node) {
  const auto& hook = node.tensor_post_acc_grad_hooks();
  return !hook || dynamic_cast<const PlainAccumulateHook*>(hook.get()) != nullptr;
}

bool is_plain(Node& node) {
  const auto plain_input = [&](uint32_t input) {
    const InputMetadata& metadata = node.input_metadata(input);
    return metadata.device().is_cpu() && !metadata.is_tensor_subclass() &&
           !metadata.is_nested_tensor();
  };
  for (uint32_t input = 0; input < node.num_inputs(); ++input) {
    if (!plain_input(input)) return false;
  }
  const auto plain_hook = [](const auto& hook) {
    return dynamic_cast<const PlainPostHook*>(hook.get()) != nullptr;
  };
  return node.pre_hooks().empty() && node.tensor_pre_hooks().empty() &&
         node.retains_grad_hooks().empty() && plain_accumulation(node) &&
         std::all_of(node.post_hooks().begin(), node.post_hooks().end(), plain_hook);
}

/// Sums what was broadcast and converts, as the engine does, where a gradient does not fit as is.
void check(Node& node, variable_list& outputs) {
  const auto& edges = node.next_edges();
  bool fit = outputs.size() == edges.size();
  for (size_t i = 0; fit && i < outputs.size(); ++i) {
    if (!edges[i].is_valid() || !outputs[i].defined()) continue;
    fit = fits(edges[i].function->input_metadata(edges[i].input_nr), outputs[i]);
  }
  if (fit) return;
  torch::autograd::validate_outputs(edges, outputs, [&](const std::string& text) {
    return "Function " + node.name() + " returned an " + text;
  });
}

/// Takes edges away from a node for as long as it lives: the node then computes nothing for them.
class WithoutEdges {
 public:
  explicit WithoutEdges(Node& node) : node_(node) {}
  ~WithoutEdges() {
    for (auto& [index, edge] : taken_) std::swap(node_.next_edges()[index], edge);
  }
  WithoutEdges(const WithoutEdges&) = delete;
  WithoutEdges& operator=(const WithoutEdges&) = delete;

  void take(size_t index) {
    taken_.emplace_back(index, Edge());
    std::swap(node_.next_edges()[index], taken_.back().second);
  }

 private:
  Node& node_;
  std::vector<std::pair<size_t, Edge>> taken_;
};

/// The engine's numbers begin at 0.
int64_t next_walk() {
  static std::atomic<int64_t> last = -1;
  return --last;
}

class WalkingGuard;

/// Set while this thread walks a graph.
thread_local WalkingGuard* walking = nullptr;

/// While it lives this thread walks a graph: without recording one, and so that a backward within
/// goes to the engine.
class WalkingGuard {
 public:
  WalkingGuard() {
    c10::GradMode::set_enabled(false);
    walking = this;
  }
  ~WalkingGuard() {
    walking = nullptr;
    c10::GradMode::set_enabled(grad_mode_);
  }
  WalkingGuard(const WalkingGuard&) = delete;
  WalkingGuard& operator=(const WalkingGuard&) = delete;
  /// Calls what `after_backward` was given since then. For the end of a backward.
  void call_back() {
    // A callback may ask for another one.
    for (size_t i = 0; i < callbacks.size(); ++i) std::exchange(callbacks[i], {})();
  }

  std::vector<std::function<void()>> callbacks;
  const int64_t number = next_walk();

 private:
  const bool grad_mode_ = c10::GradMode::is_enabled();
};

/// Set while a node that this thread runs makes a backward of its own.
thread_local NestedBackward* nested = nullptr;

bool is_walking() {
  return walking != nullptr && torch::autograd::get_current_graph_task_id() == -1;
}

/// The nodes ask the engine's thread-local task which gradients they shall compute, so one within
/// another backward must be the engine's own.
bool is_within_backward() {
  return walking != nullptr || torch::autograd::get_current_graph_task_id() != -1;
}

bool engine_is_plain() {
  return !torch::autograd::AnomalyMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         !is_within_backward();
}

/// Whether a walk may begin: this thread's modes, the loss and its gradient are as it wants them.
bool may_walk(const at::Tensor& loss, const at::Tensor& gradient, Node& root) {
  if (!engine_is_plain() || loss.layout() != at::kStrided) return false;
  if (gradient.defined()) {
    return gradient.sizes() == loss.sizes() &&
           fits(root.input_metadata(loss.output_nr()), gradient);
  }
  return loss.numel() == 1 && loss.is_floating_point();
}

/// The gradient of a loss by itself.
at::Tensor ones_of(const at::Tensor& loss) {
  if (loss.dim() == 0) return at::scalar_tensor(1, loss.options());
  return at::ones_like(loss, at::MemoryFormat::Contiguous);
}

}  // namespace

/// The nodes that a backward from one root runs, each after all that give it a gradient. The order
/// and the bits are those of LibTorch's engine.
class GraphWalk {
 public:
  /// False when there is something in the graph that only LibTorch's engine knows.
  bool explore(Node* root) {
    visit(root);
    // `steps_` grows while it is walked.
    for (size_t at = 0; at < steps_.size(); ++at) {
      Node* const node = steps_[at].node;
      if (!is_plain(*node)) return false;
      steps_[at].first_target = targets_.size();
      for (const auto& edge : node->next_edges()) {
        const uint32_t target = edge.function ? visit(edge.function.get()) : kNone;
        targets_.push_back(target);
        if (target != kNone) ++steps_[target].awaited;
      }
    }
    return true;
  }
  /// Runs all. `gradient` is for the root's `input`-th output of forward.
  void run(uint32_t input, at::Tensor gradient) {
    give_to(0, input, std::move(gradient));
    push(0);
    drain([this](Step& step) { return call(step); }, [](const Step&) { return true; });
  }

  /// The same in two halves: `run_to` runs what leads to `leaf`, `run_rest` all else. A node of
  /// both halves runs twice, each time for the half's edges only. `run_to` gives false, and has
  /// done nothing, when nothing leads there. Each half is run once.
  bool run_to(const Node* leaf, uint32_t input, at::Tensor gradient) {
    mark_leading(leaf);
    if (!steps_.front().leads) return false;
    give_to(0, input, std::move(gradient));
    push(0);
    drain([this](Step& step) { return call_half(step, /*leading=*/true); },
          [](const Step& target) { return target.leads; });
    return true;
  }
  /// Whether no node would mind that.
  bool can_be_halved() const {
    return std::none_of(steps_.begin(), steps_.end(), [](const Step& step) {
      return dynamic_cast<const RunsOnce*>(step.node) != nullptr;
    });
  }
  void run_rest() {
    for (size_t at = 0; at < steps_.size(); ++at) {
      if (steps_[at].has_rest) push(static_cast<uint32_t>(at));
    }
    drain([this](Step& step) { return call_half(step, /*leading=*/false); },
          [](const Step& target) { return !target.leads; });
  }

 private:
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  struct Step {
    Node* node;  ///< Held by the root, which its edges hold.
    size_t first_target = 0;
    uint32_t awaited = 0;  ///< Gradients that are still to come.
    variable_list inputs = {};
    bool leads = false;     ///< To the leaf of `run_to`.
    bool has_rest = false;  ///< It leads there, and has edges that do not.
  };

  /// The engine's order: the node that forward made last comes first, and leaves at once.
  struct Ready {
    uint64_t age;
    uint32_t step;
    bool operator<(const Ready& other) const { return age < other.age; }
  };

  uint32_t visit(Node* node) {
    const auto [known, is_new] = index_.emplace(node, static_cast<uint32_t>(steps_.size()));
    if (is_new) steps_.push_back({.node = node});
    return known->second;
  }
  void mark_leading(const Node* leaf) {
    const std::vector<uint32_t> order = from_root_down();
    for (size_t at = order.size(); at-- > 0;) {
      Step& step = steps_[order[at]];
      step.leads = step.node == leaf;
      bool has_other = false;
      for (size_t i = 0; i < step.node->next_edges().size(); ++i) {
        const uint32_t target = targets_[step.first_target + i];
        if (target == kNone) continue;
        (steps_[target].leads ? step.leads : has_other) = true;
      }
      step.has_rest = step.leads && has_other;
    }
  }
  /// The steps, each after all that have an edge to it.
  std::vector<uint32_t> from_root_down() const {
    std::vector<uint32_t> awaited, order{0};
    for (const Step& step : steps_) awaited.push_back(step.awaited);
    for (size_t at = 0; at < order.size(); ++at) {
      const Step& step = steps_[order[at]];
      for (size_t i = 0; i < step.node->next_edges().size(); ++i) {
        const uint32_t target = targets_[step.first_target + i];
        if (target != kNone && --awaited[target] == 0) order.push_back(target);
      }
    }
    return order;
  }
  variable_list call(Step& step) {
    Node& node = *step.node;
    variable_list inputs = std::move(step.inputs);
    node.will_release_variables();
    variable_list outputs;
    if (node.post_hooks().empty()) {
      outputs = node(std::move(inputs));
      check(node, outputs);
    } else {
      // A leaf takes a gradient over without a copy when nobody else but its hooks' list holds it.
      variable_list held = inputs;
      outputs = node(std::move(held));
      check(node, outputs);
      for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, inputs);
    }
    node.release_variables();
    return outputs;
  }
  variable_list call_half(Step& step, bool leading) {
    Node& node = *step.node;
    if (!step.has_rest) return call(step);
    variable_list inputs = leading ? step.inputs : std::move(step.inputs);
    if (!leading) node.will_release_variables();
    variable_list outputs;
    {
      WithoutEdges without(node);
      for (size_t i = 0; i < node.next_edges().size(); ++i) {
        const uint32_t target = targets_[step.first_target + i];
        if (target != kNone && steps_[target].leads != leading) without.take(i);
      }
      outputs = node(std::move(inputs));
      check(node, outputs);
    }
    if (!leading) node.release_variables();
    return outputs;
  }
  template <class Call, class Wanted>
  void drain(const Call& call, const Wanted& wanted) {
    while (!ready_.empty()) {
      Step& step = steps_[ready_.top().step];
      ready_.pop();
      variable_list outputs = call(step);
      for (size_t i = 0; i < outputs.size(); ++i) {
        const uint32_t target = targets_[step.first_target + i];
        if (target == kNone || !wanted(steps_[target])) continue;
        give_to(target, step.node->next_edge(i).input_nr, std::move(outputs[i]));
        if (--steps_[target].awaited == 0) push(target);
      }
    }
  }
  void push(uint32_t step) { ready_.push({steps_[step].node->sequence_nr(), step}); }
  void give_to(uint32_t target, uint32_t input, at::Tensor&& gradient) {
    Step& step = steps_[target];
    if (step.inputs.empty()) step.inputs.resize(step.node->num_inputs());
    at::Tensor& place = step.inputs.at(input);
    if (!gradient.defined()) return;
    if (!place.defined()) {
      place = std::move(gradient);
      return;
    }
    torch::autograd::InputBuffer sum(1);
    sum.buffer[0] = std::move(place);
    sum.add(0, std::move(gradient), std::nullopt, std::nullopt, step.node);
    place = std::move(sum.buffer[0]);
  }

  std::vector<Step> steps_;
  std::vector<uint32_t> targets_;  ///< Of all steps' edges, indices into `steps_`.
  std::priority_queue<Ready> ready_;
  ska::flat_hash_map<Node*, uint32_t> index_;
};

}  // namespace lockstep::detail

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

void after_backward(std::function<void()> callback) {
  if (detail::nested != nullptr) {
    detail::nested->callbacks_.push_back(std::move(callback));
  } else if (detail::is_walking()) {
    detail::walking->callbacks.push_back(std::move(callback));
  } else {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  }
}

int64_t current_backward() {
  if (detail::nested != nullptr) return detail::nested->number_;
  return detail::is_walking() ? detail::walking->number
                              : torch::autograd::get_current_graph_task_id();
}

NestedBackward::NestedBackward() : number_(current_backward()), outer_(detail::nested) {
  detail::nested = this;
}

NestedBackward::~NestedBackward() {
  detail::nested = outer_;
}

void NestedBackward::finish() {
  detail::nested = outer_;
  for (auto& callback : std::exchange(callbacks_, {})) after_backward(std::move(callback));
}

}  // namespace lockstep
