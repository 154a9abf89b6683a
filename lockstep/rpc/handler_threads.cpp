#include "lockstep/rpc/handler_threads.h"

#include <chrono>

namespace lockstep::rpc::detail {
namespace {

/// So long a thread waits for another task.
constexpr std::chrono::seconds kIdle{5};
/// When no task has been taken for so long, all threads count as waiting for something.
constexpr std::chrono::milliseconds kStall{10};

void join_all(std::list<std::thread>& threads) {
  for (auto& thread : threads) thread.join();
}

}  // namespace

thread_local HandlerThreads* HandlerThreads::of_this_thread = nullptr;
thread_local bool HandlerThreads::handles = false;

HandlerThreads::~HandlerThreads() {
  Threads all;
  {
    std::unique_lock lock(mutex_);
    ends_ = true;
    tasks_.clear();
    changed_.notify_all();
    watched_.notify_all();
    // Each thread moves itself to the ended ones.
    changed_.wait(lock, [&] { return threads_.empty(); });
    all.swap(ended_);
  }
  join_all(all);
  if (watch_.joinable()) watch_.join();
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
      add_if_needed(false);
    }
    if (!tasks_.empty() && free_ == 0) {
      if (!watch_.joinable()) watch_ = std::thread([this] { watch(); });
      watched_.notify_one();
    }
  }
  join_all(ended);
}

// With the lock.
void HandlerThreads::add_if_needed(bool stalled) {
  if (ends_ || tasks_.size() <= free_) return;
  if (!stalled && threads_.size() - waiting_ >= busy_) return;
  // The thread takes its first task once it gets the lock, and so finds its own handle.
  const auto self = threads_.emplace(threads_.end());
  *self = std::thread([this, self] { work(self); });
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
  ++taken_;
  auto task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

void HandlerThreads::work(Threads::iterator self) {
  of_this_thread = this;
  while (auto task = next(self)) task();
}

void HandlerThreads::watch() {
  std::unique_lock lock(mutex_);
  while (!ends_) {
    if (tasks_.empty()) {
      watched_.wait(lock);
      continue;
    }
    const int64_t before = taken_;
    watched_.wait_for(lock, kStall, [&] { return ends_; });
    if (taken_ == before) add_if_needed(true);
  }
}

HandlerThreads::Waiting::Waiting() : threads_(of_this_thread) {
  if (!threads_) return;
  const std::lock_guard lock(threads_->mutex_);
  ++threads_->waiting_;
  threads_->add_if_needed(false);
}

HandlerThreads::Waiting::~Waiting() {
  if (!threads_) return;
  const std::lock_guard lock(threads_->mutex_);
  --threads_->waiting_;
}

}  // namespace lockstep::rpc::detail
