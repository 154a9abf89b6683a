#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace lockstep::rpc::detail {

/// Tasks at times to come, on a thread of its own. They must be short and must not throw. Any
/// thread.
class LaterTasks {
 public:
  using Clock = std::chrono::steady_clock;
  LaterTasks() = default;
  /// Drops the tasks whose time has not come.
  ~LaterTasks();
  LaterTasks(const LaterTasks&) = delete;
  LaterTasks& operator=(const LaterTasks&) = delete;

  void add(Clock::time_point when, std::function<void()> task);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<Clock::time_point, std::function<void()>> tasks_;
  std::thread thread_;  ///< Begins with the first task.
  bool ends_ = false;
};

}  // namespace lockstep::rpc::detail
