#include "lockstep/train/stop_agreement.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/log.h"

namespace lockstep {
namespace {

constexpr double kMostSeconds = 0.2;
/// Of the steps' time that agreeing may take.
constexpr double kShare = 0.01;
constexpr size_t kFirstRank = 3;  ///< In what the ranks send, where the times of ranks begin.

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

StopAgreement::StopAgreement(const ProcessGroup& group, c10::Device device)
    : group_(group), device_(device), last_(Clock::now()) {}

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
  group_.all_reduce(wire, ReduceOp::max);
  const at::Tensor agreed = wire.cpu();
  const auto* values = agreed.const_data_ptr<double>();
  interval_ = interval_of(values[1], -values[2]);
  if (std::exchange(warm_, true) && compared > 0 && group_.rank() == 0) {
    const std::string news = slow_.after(compared, {values + kFirstRank, values + wire.numel()});
    if (!news.empty()) log_warning(told_ = news);
  }
  steps_ = 0;
  last_ = Clock::now();
  cost_ = seconds_between(begin, last_);
  return static_cast<int>(values[0]);
}

}  // namespace lockstep
