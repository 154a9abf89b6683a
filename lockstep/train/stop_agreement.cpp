#include "lockstep/train/stop_agreement.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/log.h"

namespace lockstep {
namespace {

constexpr double kMostSeconds = 0.2;
/// Of the steps' time that agreeing may take.
constexpr double kShare = 0.01;
constexpr size_t kFirstRank = 3;  ///< In what the ranks send, where the times of ranks begin.

constexpr double kFactor = 1.25;
constexpr double kLeastCost = 1e-3;  ///< Seconds a step.

std::string ms(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f ms", seconds * 1e3);
  return text;
}

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

/// Steps until the next agreement: the fewest that cost no more than their share.
int64_t interval_of(double step_seconds, double cost) {
  const double step = std::max(step_seconds, 1e-9);
  const double wanted = std::min(cost / (kShare * step), kMostSeconds / step);
  return static_cast<int64_t>(
      std::clamp(wanted, 1.0, static_cast<double>(StopAgreement::kMostSteps)));
}

}  // namespace

double SlowRank::median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string SlowRank::after(int64_t steps, double seconds, const std::vector<double>& own_seconds) {
  if (own_seconds.size() < 2) return {};
  own_seconds_.resize(own_seconds.size());
  slow_seconds_.resize(own_seconds.size());
  for (size_t i = 0; i < own_seconds.size(); ++i) own_seconds_[i].push_back(own_seconds[i]);
  steps_ += steps;
  seconds_ += seconds;
  all_seconds_ += seconds;
  if (steps_ < kLeastSteps) return {};
  steps_ = 0;
  std::vector<double> others;
  for (const auto& of_rank : std::exchange(own_seconds_, {})) others.push_back(median(of_rank));
  const auto slowest = std::max_element(others.begin(), others.end());
  const auto rank = static_cast<size_t>(slowest - others.begin());
  const double own = *slowest;
  others.erase(slowest);
  const double usual = median(others);
  const bool is_slow = own > kFactor * usual && own - usual >= kLeastCost;
  const double lasted = std::exchange(seconds_, 0);
  for (size_t i = 0; i < slow_seconds_.size(); ++i) {
    const double change = is_slow && i == rank ? lasted : -lasted;
    slow_seconds_[i] = std::max(0.0, slow_seconds_[i] + change);
  }
  const double least = std::max(least_seconds_, kLeastShare * all_seconds_);
  if (!is_slow || slow_seconds_[rank] < least || !told_.insert(rank).second) return {};
  return "rank " + std::to_string(rank) + " is slow: its own part of a step takes " + ms(own) +
         ", that of the other ranks " + ms(usual) + ", so each step waits " + ms(own - usual) +
         " for it";
}

StopAgreement::StopAgreement(const ProcessGroup& group, c10::Device device, SlowRank slow)
    : group_(group), device_(device), slow_(std::move(slow)), last_(Clock::now()) {}

int StopAgreement::after_step(int signal_number, double own_seconds) {
  if (group_.size() == 1) return signal_number;
  if (own_seconds > 0) own_seconds_.push_back(own_seconds);
  return ++steps_ >= interval_ ? now(signal_number) : 0;
}

int StopAgreement::now(int signal_number) {
  if (group_.size() == 1) return signal_number;
  const auto begin = Clock::now();
  const double step_seconds =
      seconds_between(last_, begin) / static_cast<double>(std::max<int64_t>(steps_, 1));
  // The slowest rank's steps, and the cost on the rank that waited least: the same everywhere.
  std::vector<double> mine{static_cast<double>(signal_number), step_seconds, -cost_};
  mine.resize(kFirstRank + static_cast<size_t>(group_.size()));
  const auto compared = static_cast<int64_t>(own_seconds_.size());
  if (compared > 0)
    mine[kFirstRank + static_cast<size_t>(group_.rank())] =
        SlowRank::median(std::exchange(own_seconds_, {}));
  at::Tensor wire = at::tensor(mine, at::device(device_).dtype(at::kDouble));
  const CallOrigin origin("agreement to stop", "Trainer");
  group_.all_reduce(wire, ReduceOp::max);
  const at::Tensor agreed = wire.cpu();
  const auto* values = agreed.const_data_ptr<double>();
  interval_ = interval_of(values[1], -values[2]);
  if (std::exchange(warm_, true) && compared > 0 && group_.rank() == 0) {
    const double seconds = step_seconds * static_cast<double>(compared);
    const std::string news =
        slow_.after(compared, seconds, {values + kFirstRank, values + wire.numel()});
    if (!news.empty()) log_warning(told_ = news);
  }
  steps_ = 0;
  last_ = Clock::now();
  cost_ = seconds_between(begin, last_);
  return static_cast<int>(values[0]);
}

}  // namespace lockstep
