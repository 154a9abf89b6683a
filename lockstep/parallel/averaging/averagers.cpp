#include "lockstep/parallel/averaging/averagers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/unflatten_dense_tensors.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

void check_warmup(const char* averager, int64_t warmup_steps) {
  if (warmup_steps >= 0) return;
  throw UsageError(std::string(averager) + ": " + std::to_string(warmup_steps) +
                   " warm-up steps; expected 0 or more");
}

constexpr const char* kStepKey = "averager_step.0";

}  // namespace

PeriodicModelAverager::PeriodicModelAverager(int64_t period, int64_t warmup_steps,
                                             ProcessGroup group)
    : period_(period), warmup_steps_(warmup_steps), group_(std::move(group)) {
  check_warmup("PeriodicModelAverager", warmup_steps);
  if (period < 1)
    throw UsageError("PeriodicModelAverager: the period is " + std::to_string(period) +
                     "; expected 1 step or more");
}

void PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  if (step_ >= warmup_steps_ && (step_ - warmup_steps_) % period_ == 0) {
    lockstep::average_parameters(get_params_to_average(parameters), group_);
  }
  ++step_;
}

HierarchicalModelAverager::HierarchicalModelAverager(
    std::vector<std::pair<int64_t, int>> period_group_sizes, int64_t warmup_steps,
    const ProcessGroup& group)
    : warmup_steps_(warmup_steps) {
  constexpr const char* kName = "HierarchicalModelAverager";
  check_warmup(kName, warmup_steps);
  if (period_group_sizes.empty()) {
    throw UsageError(std::string(kName) + ": there are no periods",
                     "give at least {period, size of the whole group}");
  }
  int64_t before = 0;
  for (const auto& [period, size] : period_group_sizes) {
    if (period <= before) {
      throw UsageError(std::string(kName) + ": period " + std::to_string(period) +
                       " is not above " + std::to_string(before) +
                       "; expected periods of 1 step or more, ascending");
    }
    before = period;
  }
  const int last = period_group_sizes.back().second;
  if (last != group.size()) {
    throw UsageError(std::string(kName) + ": the last size is " + std::to_string(last) +
                         ", but the group has " + counted(group.size(), "rank"),
                     "the largest period averages over the whole group");
  }
  for (const auto& [period, size] : period_group_sizes) {
    levels_.push_back({period, size == group.size() ? group : new_subgroups(group, size)});
  }
}

void HierarchicalModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  if (step_ >= warmup_steps_) {
    for (auto level = levels_.rbegin(); level != levels_.rend(); ++level) {
      if (step_ % level->period != 0) continue;
      lockstep::average_parameters(get_params_to_average(parameters), level->group);
      break;
    }
  }
  ++step_;
}

ProcessGroup new_subgroups(const ProcessGroup& group, int size) {
  if (size < 1 || group.size() % size != 0) {
    throw UsageError("subgroups of " + counted(size, "rank") + " do not divide the group's " +
                     std::to_string(group.size()));
  }
  return group.split(group.rank() / size, group.rank());
}

ProcessGroup new_subgroup_of_host(const ProcessGroup& group) {
  const auto hosts = group.all_gather_object(read_file("/proc/sys/kernel/random/boot_id"));
  int first = 0;
  while (hosts[static_cast<size_t>(first)] != hosts[static_cast<size_t>(group.rank())]) ++first;
  return group.split(first, group.rank());
}

void average_parameters(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  if (!group || parameters.empty()) return;
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> flat;
  flat.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) flat.push_back(parameter.reshape({-1}));
  at::Tensor all = at::cat(flat);
  all.div_(group.size());
  const CallOrigin origin("parameters", "average_parameters");
  group.all_reduce(all);
  const std::vector<at::Tensor> means = at::unflatten_dense_tensors(all, parameters);
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(means[i]);
}

std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> wanted;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) wanted.push_back(parameter);
  }
  return wanted;
}

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
