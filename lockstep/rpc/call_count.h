#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

namespace lockstep::rpc::detail {

/// This worker's calls that are under way. Any thread.
class CallCount {
 public:
  explicit CallCount(int64_t limit) : limit_(limit) {}

  /// A call begins. With `wait` not before fewer than the limit are under way; false when they
  /// still are after so long. Calls of handlers do not wait: those that they wait for may need
  /// them.
  [[nodiscard]] bool begin(std::optional<std::chrono::milliseconds> wait) {
    std::unique_lock lock(mutex_);
    if (wait && !changed_.wait_for(lock, *wait, [&] { return pending_ < limit_; })) return false;
    ++pending_;
    ++begun_;
    return true;
  }
  int64_t limit() const { return limit_; }
  void end() {
    const std::lock_guard lock(mutex_);
    --pending_;
    changed_.notify_all();
  }
  /// False when that took too long.
  bool wait_for_none(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return pending_ == 0; });
  }
  /// How many have ever begun.
  int64_t begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  int64_t pending() const {
    const std::lock_guard lock(mutex_);
    return pending_;
  }

 private:
  const int64_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t pending_ = 0, begun_ = 0;
};

}  // namespace lockstep::rpc::detail
