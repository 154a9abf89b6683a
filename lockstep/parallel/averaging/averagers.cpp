#include "lockstep/parallel/averaging/averagers.h"

#include <nlohmann/json.hpp>
#include <string>

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

void warn_of_every_step(const char* averager) {
  log_warning(std::string(averager) +
              ": with a period of 1 the parameters are averaged in every step, which sends no less "
              "than DistributedDataParallel does for gradients: use that alone");
}

}  // namespace

PeriodicModelAverager::PeriodicModelAverager(int64_t period, int64_t warmup_steps,
                                             ProcessGroup group)
    : period_(period), warmup_steps_(warmup_steps), group_(std::move(group)) {
  constexpr const char* kName = "PeriodicModelAverager";
  check_warmup(kName, warmup_steps);
  if (period < 1) {
    throw UsageError(std::string(kName) + ": the period is " + std::to_string(period) +
                     "; expected 1 step or more");
  }
  if (period == 1) warn_of_every_step(kName);
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
  if (before == 1) warn_of_every_step(kName);
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

}  // namespace lockstep
