#include "lockstep/train/training_module.h"

#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/train/training_context.h"

namespace lockstep {

namespace detail {

TrainingContext::Scope::Scope(TrainingModuleBase& module, TrainingContext& context)
    : module_(module), before_(std::exchange(module.context_, &context)) {}

TrainingContext::Scope::~Scope() {
  module_.context_ = before_;
}

}  // namespace detail

OptimizerFactory optimizer_factory(std::string name, OptimizerOptions options) {
  return [name = std::move(name), options](std::vector<at::Tensor> parameters) {
    return make_optimizer(name, std::move(parameters), options);
  };
}

TrainingModuleBase::TrainingModuleBase() = default;
TrainingModuleBase::TrainingModuleBase(std::string name) : Module(std::move(name)) {}

detail::TrainingContext& TrainingModuleBase::context(const char* caller) const {
  if (context_) return *context_;
  throw UsageError(
      std::string("TrainingModule::") + caller + " was called while no Trainer runs the module",
      "call it in training_step, validation_step or a function that these call");
}

void TrainingModuleBase::log(const std::string& name, double mean, int64_t count) {
  log_sum(name, mean * static_cast<double>(count), count);
}

void TrainingModuleBase::log(const std::string& name, const at::Tensor& mean, int64_t count) {
  log(name, mean.item<double>(), count);
}

void TrainingModuleBase::log_sum(const std::string& name, double sum, int64_t count) {
  context("log").sums.note(name, sum, static_cast<double>(count));
}

double TrainingModuleBase::update(const std::string& name,
                                  const std::function<at::Tensor()>& loss) {
  return run_update(name, loss, /*last_of_step=*/true);
}

double TrainingModuleBase::accumulate(const std::string& name,
                                      const std::function<at::Tensor()>& loss) {
  return run_update(name, loss, /*last_of_step=*/false);
}

double TrainingModuleBase::run_update(const std::string& name,
                                      const std::function<at::Tensor()>& loss, bool last_of_step) {
  const char* const caller = last_of_step ? "update" : "accumulate";
  if (const auto& update = context(caller).update) return update(name, loss, last_of_step);
  throw UsageError(
      std::string("TrainingModule::") + caller + " was called outside of training_step",
      "only training_step may change parameters and gradients");
}

c10::Device TrainingModuleBase::device() const {
  return context("device").device;
}
int64_t TrainingModuleBase::global_step() const {
  return context("global_step").step;
}
int64_t TrainingModuleBase::current_epoch() const {
  return context("current_epoch").epoch;
}

at::Tensor SupervisedModule::in_float32(const at::Tensor& output) {
  const at::ScalarType type = output.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? output.to(at::kFloat) : output;
}

void SupervisedModule::validate(const at::Tensor& output, const at::Tensor& target) {
  const double mean = loss(output, target).item<double>();
  log("loss", mean, target.size(0));
  measure(output, target, mean);
}

at::Tensor SupervisedModule::measured_loss(const at::Tensor& output, const at::Tensor& target) {
  const at::Tensor wide = in_float32(output);
  at::Tensor result = loss(wide, target);
  measure(wide, target, result.item<double>());
  return result;
}

at::Tensor SupervisedModule::training_step(const Batch& batch, int64_t) {
  return measured_loss(forward(batch.data), batch.target);
}

void SupervisedModule::validation_step(const Batch& batch, int64_t) {
  validate(in_float32(forward(batch.data)), batch.target);
}

}  // namespace lockstep
