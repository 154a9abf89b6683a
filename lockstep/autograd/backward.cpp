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

#include <algorithm>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

#include "lockstep/autograd/backward_hook.h"

namespace lockstep {
namespace {

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

/// The nodes that a backward from one root runs, each after all that give it a gradient.
class Walk {
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

  void run(uint32_t input, at::Tensor gradient) {
    Step& root = steps_.front();
    give(root, input, std::move(gradient));
    ready_.push({root.node->sequence_nr(), 0});
    while (!ready_.empty()) {
      Step& step = steps_[ready_.top().step];
      ready_.pop();
      pass_on(step, call(step));
    }
  }

 private:
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  struct Step {
    Node* node;  ///< Held by the root, which its edges hold.
    size_t first_target = 0;
    uint32_t awaited = 0;  ///< Gradients that are still to come.
    variable_list inputs = {};
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

  static bool is_plain(Node& node) {
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
           node.retains_grad_hooks().empty() && !node.tensor_post_acc_grad_hooks() &&
           std::all_of(node.post_hooks().begin(), node.post_hooks().end(), plain_hook);
  }

  static variable_list call(Step& step) {
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

  /// Sums what was broadcast and converts, as the engine does, where a gradient does not fit as is.
  static void check(Node& node, variable_list& outputs) {
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

  static void give(Step& step, uint32_t input, at::Tensor&& gradient) {
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

  void pass_on(const Step& step, variable_list outputs) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const uint32_t target = targets_[step.first_target + i];
      if (target == kNone) continue;
      Step& next = steps_[target];
      give(next, step.node->next_edge(i).input_nr, std::move(outputs[i]));
      if (--next.awaited > 0) continue;
      ready_.push({next.node->sequence_nr(), target});
    }
  }

  std::vector<Step> steps_;
  std::vector<uint32_t> targets_;  ///< Of all steps' edges, indices into `steps_`.
  std::priority_queue<Ready> ready_;
  ska::flat_hash_map<Node*, uint32_t> index_;
};

/// Set while this thread walks a graph.
thread_local bool walking = false;

class WalkingGuard {
 public:
  WalkingGuard() { walking = true; }
  ~WalkingGuard() { walking = false; }
  WalkingGuard(const WalkingGuard&) = delete;
  WalkingGuard& operator=(const WalkingGuard&) = delete;
};

/// The nodes ask the engine's thread-local task which gradients they shall compute, so one within
/// another backward must be the engine's own.
bool is_within_backward() {
  return walking || torch::autograd::get_current_graph_task_id() != -1;
}

bool engine_is_plain() {
  return !torch::autograd::AnomalyMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         !is_within_backward();
}

bool start_is_plain(const at::Tensor& loss, const at::Tensor& gradient, Node& root) {
  if (loss.layout() != at::kStrided) return false;
  if (gradient.defined()) {
    return gradient.sizes() == loss.sizes() &&
           fits(root.input_metadata(loss.output_nr()), gradient);
  }
  return loss.numel() == 1 && loss.is_floating_point();
}

at::Tensor ones_of(const at::Tensor& loss) {
  if (loss.dim() == 0) return at::scalar_tensor(1, loss.options());
  return at::ones_like(loss, at::MemoryFormat::Contiguous);
}

}  // namespace

void backward(const at::Tensor& loss, const at::Tensor& gradient) {
  // Held: a hook may let go of the caller's tensor.
  const auto root = loss.defined() ? loss.grad_fn() : nullptr;
  Walk walk;
  if (!root || !engine_is_plain() || !start_is_plain(loss, gradient, *root) ||
      !walk.explore(root.get())) {
    loss.backward(gradient);
    return;
  }
  const c10::AutoGradMode no_grad(false);
  const WalkingGuard guard;
  walk.run(loss.output_nr(), gradient.defined() ? gradient : ones_of(loss));
}

bool walks_backward(const at::Tensor& loss) {
  const auto& root = loss.grad_fn();
  return root && engine_is_plain() && start_is_plain(loss, {}, *root) && Walk().explore(root.get());
}

}  // namespace lockstep
