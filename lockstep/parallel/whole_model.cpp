#include "lockstep/parallel/whole_model.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/check_equal.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/module_state.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {

BaseStrategy::BaseStrategy(std::string name, const StrategySetup& setup)
    : checks_drift_(setup.options.check_drift),
      name_(std::move(name)),
      group_(setup.group),
      forward_context_(setup.options.forward_context) {
  if (!group_) throw UsageError("strategy " + name_ + ": the process group is null");
  if (!setup.module) throw UsageError("strategy " + name_ + ": the module is null");
}

std::optional<at::Tensor> BaseStrategy::predict(const std::function<at::Tensor()>& forward,
                                                const at::Tensor&) {
  const at::NoGradGuard no_grad;
  return in_context(forward);
}

void BaseStrategy::step(const StepScale& scale) {
  expect_last_of_step();
  // Before the update: where a rank dies here, the others' weights are those of the step before.
  if (checks_drift_ && is_compared_after(steps_ + 1)) compare_ranks();
  update(scale);
  ++steps_;
}

void BaseStrategy::compare_ranks() {
  detail::check_equal({"strategy " + name_, steps_, {}, {{"learning rate", lr()}}}, group_);
}

void BaseStrategy::update(const StepScale& scale) {
  step_by(optimizer(), scale);
}

at::Tensor BaseStrategy::in_context(const std::function<at::Tensor()>& forward) const {
  const auto context = forward_context_ ? forward_context_() : nullptr;
  return forward();
}

void BaseStrategy::expect_last_of_step() const {
  if (!adding_up_) return;
  throw UsageError("strategy " + name_ + ", rank " + std::to_string(group_.rank()) +
                       ": step() while gradients only add up: they are not averaged over the ranks",
                   "set BatchWork::last_of_step for the last batch before each step");
}

StateDict BaseStrategy::model_state() {
  return gives_states() ? spread_model().gather() : StateDict();
}
StateDict BaseStrategy::optimizer_state() {
  return gives_states() ? spread_optimizer().gather(optimizer().state()) : StateDict();
}

WholeModelStrategy::WholeModelStrategy(std::string name, const StrategySetup& setup)
    : RowStrategy(std::move(name), setup),
      module_(setup.module),
      parameters_(unique_parameters(setup.module->parameters())) {}

void WholeModelStrategy::average_gradients(const DdpOptions& options, bool micro_batches,
                                           const ReducerFactory& make_reducer) {
  // By a hook of the user's own, as of local SGD, ranks may have weights of their own for a while.
  const bool has_own_hook = options.custom_hook || options.async_custom_hook;
  if (group().size() == 1 && !has_own_hook) return;
  DdpOptions own = options;
  own.check_drift = checks_drift_ && options.check_drift && !has_own_hook;
  checks_drift_ = own.check_drift && options.ignored.empty();
  if (!micro_batches) {
    core_ = make_ddp_core(*module_, group(), own, make_reducer, "strategy " + name());
    return;
  }
  // A stage may have no parameters that are trained, and none of those that are ignored.
  auto reduced = whole_module_state(*module_).reduced;
  std::erase_if(reduced, [&](const ReducedParameter& parameter) {
    return parameter.tensor.numel() == 0 || std::ranges::count(own.ignored, parameter.name) > 0;
  });
  if (reduced.empty()) return;
  // What no micro-batch of any rank has used keeps no gradient.
  own.find_unused_parameters = true;
  reducer_ = make_reducer
                 ? make_reducer(reduced)
                 : make_bucket_reducer(std::move(reduced), group(), own, "DistributedDataParallel");
}

void WholeModelStrategy::reduce_accumulated() {
  if (reducer_) reducer_->reduce_all();
}

void WholeModelStrategy::check_equal() {
  if (!checks_drift_) return;
  Compared mine{.what = "strategy " + name()};
  for (const auto& item : module_->named_parameters())
    mine.tensors.emplace_back(item.key(), item.value().detach());
  detail::check_equal(mine, group());
}

void WholeModelStrategy::run_batch(const BatchWork& work) {
  if (!core_) return backward(compute_loss(work));
  core_->synchronizing() = work.last_of_step;
  core_->before_forward();
  const at::Tensor loss = compute_loss(work);
  core_->after_forward();
  backward(loss);
}

void WholeModelStrategy::warm_up(const BatchWork& work) {
  if (!core_) return;
  run_batch(work);
  zero_grad();
}

void WholeModelStrategy::share_buffers() {
  detail::share_buffers(*module_, group());
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

/// Parameters are alike on all ranks. Buffers may differ: those of rank 0 count.
SpreadModel WholeModelStrategy::spread_model() {
  std::vector<at::Tensor> tensors = parameters_;
  std::vector<Part> parts;
  for (const at::Tensor& parameter : parameters_) parts.push_back({0, parameter.numel()});
  for (const NamedTensor& buffer : whole_module_state(*module_).buffers) {
    tensors.push_back(buffer.tensor);
    parts.push_back({0, group().rank() == 0 ? buffer.tensor.numel() : 0});
  }
  const auto values = [tensors](size_t i) { return tensors[i].detach(); };
  const auto store = [tensors](size_t i, const at::Tensor& whole) {
    at::Tensor(tensors[i]).copy_(whole);
  };
  return {*module_, tensors, parameters_.size(), {{}, tensors, parts}, values, store};
}

at::Tensor WholeModelStrategy::compute_loss(const BatchWork& work) {
  adding_up_ = !work.last_of_step;
  return in_context(work.loss);
}

WholeOptimizerStrategy::WholeOptimizerStrategy(std::string name, const StrategySetup& setup)
    : WholeModelStrategy(std::move(name), setup), optimizer_(setup.make_optimizer(parameters())) {}

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

SpreadOptimizer WholeOptimizerStrategy::spread_optimizer() {
  SpreadOptimizer spread{{{}, parameters(), {}}, {}};
  for (size_t i = 0; i < parameters().size(); ++i) {
    spread.spread.parts.push_back({0, parameters()[i].numel()});
    spread.indices.push_back(i);
  }
  return spread;
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

void step_by(Optimizer& optimizer, const StepScale& scale) {
  scale.grad_scale.defined() || scale.found_inf.defined() ? optimizer.step_scaled(scale)
                                                          : optimizer.step();
}

double clip_shards(const std::vector<at::Tensor>& gradients, double max_norm,
                   const ProcessGroup& group, const std::vector<bool>& counts) {
  const auto device = group.native().getBoundDeviceId().value_or(c10::Device(c10::kCPU));
  return clip_gradients(gradients, max_norm, [&](const auto& norms, const auto& places) {
    at::Tensor sum = at::zeros({1}, at::dtype(at::kDouble).device(device));
    for (size_t i = 0; i < norms.size(); ++i) {
      if (counts.empty() || counts[places[i]]) sum += norms[i].to(device, at::kDouble).square();
    }
    if (group.size() > 1) group.all_reduce(sum);
    return sum.sqrt().squeeze();
  });
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

namespace lockstep {

std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup) {
  return detail::make_ddp_row(setup, /*micro_batches=*/false);
}

std::unique_ptr<detail::RowStrategy> detail::make_ddp_row(const StrategySetup& setup,
                                                          bool micro_batches) {
  auto strategy = std::make_unique<WholeOptimizerStrategy>("ddp", setup);
  strategy->average_gradients(setup.options.ddp.value_or(DdpOptions()), micro_batches);
  return strategy;
}

}  // namespace lockstep
