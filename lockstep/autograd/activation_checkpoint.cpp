#include "lockstep/autograd/activation_checkpoint.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "lockstep/autograd/backward_hook.h"
#include "lockstep/autograd/make_node.h"
#include "lockstep/autograd/recorded_state.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

bool may_need_gradient(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

/// Runs the function a second time and passes the gradients through it.
class CheckpointBackward : public Node, public RunsOnce {
 public:
  CheckpointBackward(Function function, const std::vector<at::Tensor>& inputs, RecordedState state)
      : function_(std::move(function)), state_(std::move(state)) {
    for (const at::Tensor& input : inputs) {
      saved_.emplace_back(input, /*is_output=*/false);
      needs_gradient_.push_back(input.defined() && input.requires_grad());
    }
  }

  std::string name() const override { return "CheckpointBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& saved : saved_) saved.reset_data();
    function_ = nullptr;
  }

 protected:
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard lock(mutex_);
    check_use();
    const std::vector<at::Tensor> inputs = leaves();
    std::vector<at::Tensor> outputs;
    {
      const c10::AutoGradMode with_graph(true);
      const RecordedState::Replay replay(state_);
      outputs = function_(inputs);
    }
    run_backward(outputs, gradients);
    variable_list result;
    for (size_t i = 0; i < inputs.size(); ++i) {
      result.push_back(needs_gradient_[i] ? inputs[i].grad() : at::Tensor());
    }
    result.emplace_back();  // Of the tensor that only makes backward come here.
    return result;
  }

 private:
  void check_use() const {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      throw UsageError("checkpoint: backward with named inputs does not reach what is inside",
                       "call backward() without inputs, or do not checkpoint here");
    }
    if (c10::GradMode::is_enabled()) {
      throw UsageError("checkpoint: gradients of gradients are not kept",
                       "do not checkpoint what is differentiated twice");
    }
    if (!function_) {
      throw UsageError("checkpoint: backward through it a second time",
                       "run forward again before it");
    }
  }

  /// The inputs as leaves of a graph of their own.
  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> leaves;
    for (size_t i = 0; i < saved_.size(); ++i) {
      at::Tensor input = saved_[i].unpack();
      if (input.defined()) input = input.detach().set_requires_grad(needs_gradient_[i]);
      leaves.push_back(std::move(input));
    }
    return leaves;
  }

  static void run_backward(const std::vector<at::Tensor>& outputs, const variable_list& gradients) {
    if (outputs.size() != gradients.size()) {
      throw UsageError("checkpoint: the function gave " + std::to_string(outputs.size()) +
                           " outputs in its second run, " + std::to_string(gradients.size()) +
                           " in its first",
                       "it must do the same in both runs");
    }
    variable_list roots, given;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].defined() || !outputs[i].requires_grad()) continue;
      if (outputs[i].sizes() != gradients[i].sizes()) {
        throw UsageError("checkpoint: output " + std::to_string(i) + " has shape " +
                             c10::str(outputs[i].sizes()) + " in the function's second run, " +
                             c10::str(gradients[i].sizes()) + " in its first",
                         "it must do the same in both runs");
      }
      roots.push_back(outputs[i]);
      given.push_back(gradients[i]);
    }
    if (roots.empty()) return;
    NestedBackward nested;
    torch::autograd::backward(roots, given);
    nested.finish();
  }

  Function function_;
  RecordedState state_;
  std::vector<SavedVariable> saved_;
  std::vector<bool> needs_gradient_;
};

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
      devices.push_back(tensor.device());
    }
  }
  return devices;
}

}  // namespace

std::vector<at::Tensor> checkpoint(Function function, const std::vector<at::Tensor>& inputs,
                                   const CheckpointOptions& options) {
  if (!c10::GradMode::is_enabled()) return function(inputs);
  RecordedState state = RecordedState::record(devices_of(inputs), options.preserve_rng_state);
  std::vector<at::Tensor> outputs;
  {
    const c10::AutoGradMode no_graph(false);
    outputs = function(inputs);
  }
  // The function's parameters are not known here. This makes backward come here in any case.
  const at::Tensor always = at::empty({0}).requires_grad_();
  const auto node = make_node<CheckpointBackward>(std::move(function), inputs, std::move(state));
  variable_list edges = inputs;
  edges.push_back(always);
  node->set_next_edges(torch::autograd::collect_next_edges(edges));
  for (at::Tensor& output : outputs) {
    if (!may_need_gradient(output)) {
      node->add_input_metadata(Node::undefined_input());
      continue;
    }
    // A tensor of its own: the function may have returned an input.
    output = output.detach();
    torch::autograd::set_history(output, node);
  }
  return outputs;
}

at::Tensor checkpoint(std::function<at::Tensor(const at::Tensor&)> function,
                      const at::Tensor& input, const CheckpointOptions& options) {
  return checkpoint(
      [function = std::move(function)](const std::vector<at::Tensor>& inputs) {
        return std::vector<at::Tensor>{function(inputs.front())};
      },
      std::vector<at::Tensor>{input}, options)[0];
}

at::Tensor checkpoint_sequential(
    const std::vector<std::function<at::Tensor(const at::Tensor&)>>& functions, int64_t segments,
    const at::Tensor& input, const CheckpointOptions& options) {
  const auto count = static_cast<int64_t>(functions.size());
  if (segments < 1 || segments > count) {
    throw UsageError("checkpoint_sequential: " + std::to_string(segments) + " segments of " +
                         std::to_string(count) + " functions",
                     "there must be 1 to " + std::to_string(count));
  }
  using Functions = std::vector<std::function<at::Tensor(const at::Tensor&)>>;
  const auto run = [](const Functions& part, at::Tensor x) {
    for (const auto& function : part) x = function(x);
    return x;
  };
  at::Tensor x = input;
  const int64_t length = count / segments;
  auto next = functions.begin();
  for (int64_t segment = 0; segment + 1 < segments; ++segment, next += length) {
    const Functions part(next, next + length);
    x = checkpoint([run, part](const at::Tensor& from) { return run(part, from); }, x, options);
  }
  return run(Functions(next, functions.end()), x);
}

}  // namespace lockstep
