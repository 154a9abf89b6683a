#include "lockstep/autograd/graph_walk.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <utility>

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

/// Set while this thread walks a graph.
thread_local WalkingGuard* walking = nullptr;

/// Set while a node that this thread runs makes a backward of its own.
thread_local NestedBackward* nested = nullptr;

/// The engine's numbers begin at 0.
int64_t next_walk() {
  static std::atomic<int64_t> last = -1;
  return --last;
}

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

}  // namespace

bool GraphWalk::explore(Node* root) {
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

uint32_t GraphWalk::visit(Node* node) {
  const auto [known, is_new] = index_.emplace(node, static_cast<uint32_t>(steps_.size()));
  if (is_new) steps_.push_back({.node = node});
  return known->second;
}

variable_list GraphWalk::call(Step& step) {
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

void GraphWalk::give_to(uint32_t target, uint32_t input, at::Tensor&& gradient) {
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

/// Calls what is ready until nothing is. Results go to the steps that are `wanted`.
template <class Call, class Wanted>
void GraphWalk::drain(const Call& call, const Wanted& wanted) {
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

void GraphWalk::push(uint32_t step) {
  ready_.push({steps_[step].node->sequence_nr(), step});
}

void GraphWalk::run(uint32_t input, at::Tensor gradient) {
  give_to(0, input, std::move(gradient));
  push(0);
  drain([this](Step& step) { return call(step); }, [](const Step&) { return true; });
}

/// The steps, each after all that have an edge to it.
std::vector<uint32_t> GraphWalk::from_root_down() const {
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

void GraphWalk::mark_leading(const Node* leaf) {
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

variable_list GraphWalk::call_half(Step& step, bool leading) {
  Node& node = *step.node;
  if (!step.has_rest) return call(step);
  variable_list inputs = leading ? step.inputs : std::move(step.inputs);
  if (!leading) node.will_release_variables();
  variable_list outputs;
  {
    // The node computes nothing for edges that it has not.
    torch::autograd::edge_list all = node.next_edges();
    const auto put_back = c10::make_scope_exit([&] { node.next_edges().swap(all); });
    for (size_t i = 0; i < node.next_edges().size(); ++i) {
      const uint32_t target = targets_[step.first_target + i];
      if (target != kNone && steps_[target].leads != leading) node.next_edges()[i] = Edge();
    }
    outputs = node(std::move(inputs));
    check(node, outputs);
  }
  if (!leading) node.release_variables();
  return outputs;
}

bool GraphWalk::run_to(const Node* leaf, uint32_t input, at::Tensor gradient) {
  mark_leading(leaf);
  if (!steps_.front().leads) return false;
  give_to(0, input, std::move(gradient));
  push(0);
  drain([this](Step& step) { return call_half(step, /*leading=*/true); },
        [](const Step& target) { return target.leads; });
  return true;
}

bool GraphWalk::can_be_halved() const {
  return std::none_of(steps_.begin(), steps_.end(), [](const Step& step) {
    return dynamic_cast<const RunsOnce*>(step.node) != nullptr;
  });
}

void GraphWalk::run_rest() {
  for (size_t at = 0; at < steps_.size(); ++at) {
    if (steps_[at].has_rest) push(static_cast<uint32_t>(at));
  }
  drain([this](Step& step) { return call_half(step, /*leading=*/false); },
        [](const Step& target) { return !target.leads; });
}

bool may_walk(const at::Tensor& loss, const at::Tensor& gradient, Node& root) {
  if (!engine_is_plain() || loss.layout() != at::kStrided) return false;
  if (gradient.defined()) {
    return gradient.sizes() == loss.sizes() &&
           fits(root.input_metadata(loss.output_nr()), gradient);
  }
  return loss.numel() == 1 && loss.is_floating_point();
}

WalkingGuard::WalkingGuard() : number_(next_walk()) {
  walking = this;
}

WalkingGuard::~WalkingGuard() {
  walking = nullptr;
}

void WalkingGuard::call_back() {
  // A callback may ask for another one.
  for (size_t i = 0; i < callbacks_.size(); ++i) std::exchange(callbacks_[i], {})();
}

at::Tensor ones_of(const at::Tensor& loss) {
  if (loss.dim() == 0) return at::scalar_tensor(1, loss.options());
  return at::ones_like(loss, at::MemoryFormat::Contiguous);
}

}  // namespace lockstep::detail

namespace lockstep {

void after_backward(std::function<void()> callback) {
  if (detail::nested != nullptr) {
    detail::nested->callbacks_.push_back(std::move(callback));
  } else if (detail::is_walking()) {
    detail::walking->callbacks_.push_back(std::move(callback));
  } else {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  }
}

int64_t current_backward() {
  if (detail::nested != nullptr) return detail::nested->number_;
  return detail::is_walking() ? detail::walking->number_
                              : torch::autograd::get_current_graph_task_id();
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_id() != -1 &&
         torch::autograd::get_current_graph_task_keep_graph();
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
