#include "lockstep/parallel/whole_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {

WholeModelStrategy::WholeModelStrategy(const StrategySetup& setup)
    : module_(setup.module),
      parameters_(unique_parameters(setup.module->parameters())),
      group_(setup.group),
      forward_context_(setup.options.forward_context) {
  if (!group_) throw UsageError("strategy: the process group is null");
}

void WholeModelStrategy::average_gradients(const DdpOptions& options,
                                           const ReducerFactory& make_reducer) {
  if (group_.size() > 1)
    core_.emplace(*module_, group_, options, make_reducer, "strategy " + name());
}

void WholeModelStrategy::run_batch(const BatchWork& work) {
  if (!core_) return backward(compute_loss(work));
  core_->synchronizing() = work.last_of_step;
  core_->before_forward();
  std::vector<at::Tensor> losses{compute_loss(work)};
  core_->after_forward(losses);
  backward(losses.front());
}

void WholeModelStrategy::warm_up(const BatchWork& work) {
  if (!core_) return;
  run_batch(work);
  zero_grad();
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
  return gradients_of(parameters_);
}

double WholeModelStrategy::clip_grad_norm(double max_norm) {
  return lockstep::clip_grad_norm(parameters_, max_norm);
}

void WholeModelStrategy::zero_grad() {
  adding_up_ = false;
  lockstep::zero_grad(parameters_);
}

StateDict WholeModelStrategy::model_state() {
  if (group_.rank() != 0) return {};
  StateDict state = state_dict(*module_);
  for (auto& [name, tensor] : state) tensor = tensor.detach();
  return state;
}

void WholeModelStrategy::load_model_state(const StateDict& state) {
  load_state_dict(*module_, state, "the checkpoint's model.safetensors");
}

at::Tensor WholeModelStrategy::compute_loss(const BatchWork& work) {
  adding_up_ = !work.last_of_step;
  const auto context = forward_context_ ? forward_context_() : nullptr;
  return work.loss();
}

void WholeModelStrategy::expect_last_of_step() const {
  if (!adding_up_) return;
  throw UsageError(name() + ", rank " + std::to_string(group_.rank()) +
                       ": step() while gradients only add up: they are not averaged over the ranks",
                   "set BatchWork::last_of_step for the last batch before each step");
}

WholeOptimizerStrategy::WholeOptimizerStrategy(const StrategySetup& setup)
    : WholeModelStrategy(setup), optimizer_(setup.make_optimizer(parameters())) {}

void WholeOptimizerStrategy::step(const StepScale& scale) {
  expect_last_of_step();
  scale.grad_scale.defined() || scale.found_inf.defined() ? optimizer_->step_scaled(scale)
                                                          : optimizer_->step();
}

double WholeOptimizerStrategy::step_with(const LossClosure& closure) {
  expect_last_of_step();
  return optimizer_->step_with([&] {
    const double loss = closure();
    if (group().size() == 1) return loss;
    at::Tensor mean =
        at::full({1}, loss / group().size(),
                 parameters().front().options().dtype(at::kDouble).requires_grad(false));
    group().all_reduce(mean);
    return mean.item<double>();
  });
}

StateDict WholeOptimizerStrategy::optimizer_state() {
  return group().rank() == 0 ? optimizer_->state() : StateDict();
}

StateBytes WholeOptimizerStrategy::state_bytes() const {
  return {bytes_of(parameters()), bytes_of(gradients()), bytes_of(optimizer_->state())};
}

void refuse_closure(const Optimizer& optimizer, const std::string& strategy,
                    const std::string& reason) {
  if (!optimizer.needs_closure()) return;
  throw UsageError(strategy + ": the optimizer " + optimizer.name() + " " + reason,
                   "use strategy ddp or dp, or another optimizer");
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

int64_t bytes_of(const StateDict& state) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : state) bytes += bytes_of(tensor);
  return bytes;
}

}  // namespace lockstep::detail
