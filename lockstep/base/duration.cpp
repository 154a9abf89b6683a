#include "lockstep/base/duration.h"

#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kShortestTimeout{1};

constexpr double in_seconds(std::chrono::milliseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

}  // namespace

std::string timeout_bounds() {
  return "from 0.001 to " + std::to_string(kLongestTimeout.count()) + " seconds";
}

std::optional<std::chrono::milliseconds> timeout_of_seconds(double seconds) {
  const bool within = seconds >= in_seconds(kShortestTimeout) &&
                      seconds <= in_seconds(kLongestTimeout);  // false for NaN
  if (!within) return std::nullopt;
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

void check_timeout(const std::string& what, std::chrono::milliseconds timeout) {
  if (timeout >= kShortestTimeout && timeout <= kLongestTimeout) return;
  throw UsageError(what + ": a time-out of " + std::to_string(timeout.count()) +
                       " ms; expected one " + timeout_bounds(),
                   "to wait practically for ever, give the longest, which is 11 days");
}

}  // namespace lockstep
