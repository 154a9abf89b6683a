#include "lockstep/parallel/averaging/averagers.h"

#include <ATen/ops/full.h>

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep {
namespace {

constexpr const char* kStepKey = "averager_step.0";

}  // namespace

PostLocalSGDOptimizer::PostLocalSGDOptimizer(std::unique_ptr<Optimizer> optimizer,
                                             std::vector<at::Tensor> parameters,
                                             std::shared_ptr<ModelAverager> averager)
    : optimizer_(std::move(optimizer)),
      parameters_(std::move(parameters)),
      averager_(std::move(averager)) {
  if (!optimizer_ || !averager_) {
    throw UsageError("PostLocalSGDOptimizer: the optimizer or the averager is null");
  }
}

void PostLocalSGDOptimizer::step() {
  optimizer_->step();
  averager_->average_parameters(parameters_);
}

void PostLocalSGDOptimizer::step_scaled(const StepScale& scale) {
  optimizer_->step_scaled(scale);
  averager_->average_parameters(parameters_);
}

StateDict PostLocalSGDOptimizer::state() const {
  StateDict state = optimizer_->state();
  state.emplace_back(kStepKey, at::full({1}, averager_->step(), at::kLong));
  return state;
}

void PostLocalSGDOptimizer::load_state(const StateDict& state) {
  StateDict own = state;
  const auto step = std::find_if(own.begin(), own.end(),
                                 [](const auto& entry) { return entry.first == kStepKey; });
  int64_t count = 0;
  if (step == own.end()) {
    log_warning("PostLocalSGDOptimizer: the state has no '" + std::string(kStepKey) +
                "': the averager counts its steps from 0 again");
  } else {
    if (step->second.numel() != 1) {
      throw CheckpointError("PostLocalSGDOptimizer: '" + std::string(kStepKey) +
                            "' is not one number");
    }
    count = step->second.item<int64_t>();
    own.erase(step);
  }
  optimizer_->load_state(own);
  averager_->set_step(count);
}

}  // namespace lockstep
