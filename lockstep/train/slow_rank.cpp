#include "lockstep/train/slow_rank.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace lockstep {
namespace {

constexpr double kFactor = 1.25;
constexpr double kLeastCost = 1e-3;  ///< Seconds a step.

std::string ms(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f ms", seconds * 1e3);
  return text;
}

}  // namespace

double SlowRank::median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string SlowRank::after(int64_t steps, const std::vector<double>& own_seconds) {
  if (own_seconds.size() < 2) return {};
  seconds_.resize(own_seconds.size());
  for (size_t i = 0; i < seconds_.size(); ++i) seconds_[i].push_back(own_seconds[i]);
  steps_ += steps;
  if (steps_ < kLeastSteps) return {};
  steps_ = 0;
  std::vector<double> others;
  for (const auto& of_rank : std::exchange(seconds_, {})) others.push_back(median(of_rank));
  const auto slowest = std::max_element(others.begin(), others.end());
  const auto rank = static_cast<int>(slowest - others.begin());
  const double own = *slowest;
  others.erase(slowest);
  const double usual = median(others);
  const bool is_slow = own > kFactor * usual && own - usual >= kLeastCost;
  const int now = is_slow ? rank : -1;
  times_ = std::exchange(seen_, now) == now ? times_ + 1 : 1;
  if (now == slow_ || times_ < patience_) return {};
  const int before = std::exchange(slow_, now);
  if (!is_slow) patience_ *= 2;
  if (!is_slow) return "rank " + std::to_string(before) + " is as fast as the other ranks again";
  return "rank " + std::to_string(rank) + " is slow: its own part of a step takes " + ms(own) +
         ", that of the other ranks " + ms(usual) + ", so each step waits " + ms(own - usual) +
         " for it";
}

}  // namespace lockstep
