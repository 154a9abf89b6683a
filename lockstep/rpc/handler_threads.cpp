#include "lockstep/rpc/handler_threads.h"

#include <chrono>

namespace lockstep::rpc::detail {
namespace {

/// So long a thread waits for another task.
constexpr std::chrono::seconds kIdle{5};

void join_all(std::list<std::thread>& threads) {
  for (auto& thread : threads) thread.join();
}

}  // namespace

HandlerThreads::~HandlerThreads() {
  Threads all;
  {
    std::unique_lock lock(mutex_);
    ends_ = true;
    tasks_.clear();
    changed_.notify_all();
    // Each thread moves itself to the ended ones.
    changed_.wait(lock, [&] { return threads_.empty(); });
    all.swap(ended_);
  }
  join_all(all);
}

void HandlerThreads::run(std::function<void()> task) {
  Threads ended;
  {
    const std::lock_guard lock(mutex_);
    if (ends_) return;
    ended.swap(ended_);
    tasks_.push_back(std::move(task));
    if (free_ >= tasks_.size()) {
      changed_.notify_one();
    } else {
      // The thread takes its first task once it gets the lock, and so finds its own handle.
      const auto self = threads_.emplace(threads_.end());
      *self = std::thread([this, self] { work(self); });
    }
  }
  join_all(ended);
}

size_t HandlerThreads::size() const {
  const std::lock_guard lock(mutex_);
  return threads_.size();
}

std::function<void()> HandlerThreads::next(Threads::iterator self) {
  std::unique_lock lock(mutex_);
  ++free_;
  changed_.wait_for(lock, kIdle, [&] { return ends_ || !tasks_.empty(); });
  --free_;
  if (tasks_.empty()) {
    ended_.splice(ended_.end(), threads_, self);
    if (ends_) changed_.notify_all();
    return {};
  }
  auto task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

void HandlerThreads::work(Threads::iterator self) {
  while (auto task = next(self)) task();
}

}  // namespace lockstep::rpc::detail
