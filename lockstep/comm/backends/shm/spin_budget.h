#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::shm {

/// How long a wait may look for others before it sleeps, learnt from how it went: more while that
/// finds them in time, so that nothing is lost by sleeping; soon no more than the least when they
/// come later, as with ranks that have unlike work or on a machine that others use too, where who
/// looks keeps a processor from who is looked for.
class SpinBudget {
 public:
  using nanoseconds = std::chrono::nanoseconds;

  SpinBudget(nanoseconds least, nanoseconds most)
      : least_(least), most_(std::max(least, most)), now_(most_) {}

  nanoseconds now() const { return now_; }
  /// After a wait that had to look: whether the others came within it.
  void learn(bool found) {
    now_ = found ? std::min(most_, now_ + most_ / kRise) : std::max(least_, now_ / 2);
  }

 private:
  static constexpr int kRise = 25;  ///< One wait in vain outweighs some ten that were not.

  nanoseconds least_;
  nanoseconds most_;
  nanoseconds now_;
};

}  // namespace lockstep::shm
