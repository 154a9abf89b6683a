#pragma once

#include <chrono>

namespace lockstep::shm {

/// The end of a wait. Who looks much later than it meant to stood still, perhaps with its whole
/// machine. That counts for nobody's lateness: what came meanwhile is not read yet.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Deadline(std::chrono::milliseconds timeout)
      : last_(Clock::now()), end_(last_ + timeout) {}

  /// To be asked several times a second.
  bool passed() {
    constexpr std::chrono::seconds kStandstill{1};
    const auto now = Clock::now();
    if (now - last_ > kStandstill) end_ += now - last_;
    last_ = now;
    return now >= end_;
  }

 private:
  Clock::time_point last_;
  Clock::time_point end_;
};

}  // namespace lockstep::shm
