#include "lockstep/parallel/whole_model.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "lockstep/base/error.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {

WholeModelStrategy::WholeModelStrategy(const StrategySetup& setup)
    : module_(setup.module),
      parameters_(setup.module->parameters()),
      group_(setup.group),
      forward_context_(setup.options.forward_context) {
  if (!group_) throw UsageError("strategy: the process group is null");
}

std::optional<at::Tensor> WholeModelStrategy::predict(const std::function<at::Tensor()>& forward,
                                                      const at::Tensor&) {
  const at::NoGradGuard no_grad;
  const auto context = forward_context_ ? forward_context_() : nullptr;
  return forward();
}

void WholeModelStrategy::share_buffers() {
  detail::share_buffers(*module_, group_);
}

std::vector<at::Tensor> WholeModelStrategy::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

double WholeModelStrategy::clip_grad_norm(double max_norm) {
  return lockstep::clip_grad_norm(parameters_, max_norm);
}

void WholeModelStrategy::zero_grad() {
  lockstep::zero_grad(parameters_);
}

OptimizerState WholeModelStrategy::model_state() {
  if (group_.rank() != 0) return {};
  OptimizerState state = state_dict(*module_);
  for (auto& [name, tensor] : state) tensor = tensor.detach();
  return state;
}

void WholeModelStrategy::load_model_state(const OptimizerState& state) {
  load_state_dict(*module_, state, "the checkpoint's model.safetensors");
}

at::Tensor WholeModelStrategy::compute_loss(const BatchWork& work) const {
  const auto context = forward_context_ ? forward_context_() : nullptr;
  return work.loss();
}

WholeOptimizerStrategy::WholeOptimizerStrategy(const StrategySetup& setup)
    : WholeModelStrategy(setup), optimizer_(setup.make_optimizer(parameters())) {}

void WholeOptimizerStrategy::step(const StepScale& scale) {
  scale.grad_scale.defined() || scale.found_inf.defined() ? optimizer_->step_scaled(scale)
                                                          : optimizer_->step();
}

OptimizerState WholeOptimizerStrategy::optimizer_state() {
  return group().rank() == 0 ? optimizer_->state() : OptimizerState();
}

StateBytes WholeOptimizerStrategy::state_bytes() const {
  return {bytes_of(parameters()), bytes_of(gradients()), bytes_of(optimizer_->state())};
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

int64_t bytes_of(const OptimizerState& state) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state) bytes += bytes_of(tensor);
  return bytes;
}

}  // namespace lockstep::detail
