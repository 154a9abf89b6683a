#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace lockstep {

/// Until then; at least 0.
inline std::chrono::milliseconds time_left(std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  const auto left = deadline - std::chrono::steady_clock::now();
  return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(left));
}

/// The pauses of a loop that polls a store. There is none at first, as the answer mostly comes
/// within some round trips. Then they grow with the time already waited, to at most 2 ms unless
/// told otherwise.
class PollPause {
 public:
  using Clock = std::chrono::steady_clock;
  explicit PollPause(std::chrono::microseconds longest = std::chrono::microseconds(2000))
      : longest_(longest) {}
  std::chrono::microseconds next() {
    constexpr std::chrono::microseconds kEager{200}, kShortest{50};
    const auto waited =
        std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start_);
    if (waited < kEager) return std::chrono::microseconds(0);
    return std::clamp(waited / 20, kShortest, longest_);
  }
  void sleep() {
    const auto pause = next();
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
  }

 private:
  std::chrono::microseconds longest_;
  Clock::time_point start_ = Clock::now();
};

/// True every so often, the first time after `every`.
class Every {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Every(std::chrono::milliseconds every) : every_(every), next_(Clock::now() + every) {}
  bool due() {
    const auto now = Clock::now();
    if (now < next_) return false;
    next_ = now + every_;
    return true;
  }

 private:
  std::chrono::milliseconds every_;
  Clock::time_point next_;
};

}  // namespace lockstep
