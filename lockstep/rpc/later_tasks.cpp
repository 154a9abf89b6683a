#include "lockstep/rpc/later_tasks.h"

namespace lockstep::rpc::detail {

LaterTasks::~LaterTasks() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void LaterTasks::add(Clock::time_point when, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  const bool first = tasks_.empty() || when < tasks_.begin()->first;
  tasks_.emplace(when, std::move(task));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { work(); });
  } else if (first) {
    changed_.notify_all();
  }
}

void LaterTasks::work() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    if (tasks_.empty()) {
      changed_.wait(lock);
    } else if (const auto when = tasks_.begin()->first; Clock::now() < when) {
      changed_.wait_until(lock, when);
    } else {
      const auto task = std::move(tasks_.extract(tasks_.begin()).mapped());
      lock.unlock();
      task();
      lock.lock();
    }
  }
}

}  // namespace lockstep::rpc::detail
