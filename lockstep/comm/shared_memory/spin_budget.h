#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace lockstep::shm {

/// How long a wait may look for others before it sleeps, learnt from how long the waits take. It is
/// `most` where that is enough to find them, so that nothing is lost by sleeping. It is soon no
/// more than `least` where they come later. That is so with ranks that have unlike work, or on a
/// machine that others use too. There a rank that looks keeps a processor from the rank that it
/// looks for. Any thread: of two that learn at once one may count for nothing.
class SpinBudget {
 public:
  using nanoseconds = std::chrono::nanoseconds;

  SpinBudget(nanoseconds least, nanoseconds most)
      : least_(least), most_(std::max(least, most)), now_(most_) {}

  nanoseconds now() const { return now_.load(std::memory_order_relaxed); }
  /// How long a wait took that was not over at the first look, asleep or not.
  void learn(nanoseconds waited) {
    const nanoseconds next =
        waited <= most_ ? std::min(most_, now() + most_ / kRise) : std::max(least_, now() / 2);
    now_.store(next, std::memory_order_relaxed);
  }

 private:
  static constexpr int kRise = 25;  ///< One that is too long outweighs some ten that are not.

  nanoseconds least_;
  nanoseconds most_;
  std::atomic<nanoseconds> now_;
};

}  // namespace lockstep::shm
