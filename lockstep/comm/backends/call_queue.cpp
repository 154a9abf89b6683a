#include "lockstep/comm/backends/call_queue.h"

#include <algorithm>

#include "lockstep/base/error.h"

namespace lockstep::backends {

void CallQueue::submit(const WorkPtr& work) {
  const bool blocking = !work->request().async;
  std::unique_lock lock(mutex_);
  if (closed_) {
    lock.unlock();
    work->complete(std::make_exception_ptr(CommError(
        work->text() + " comes after the group was closed", "keep the group until its last call")));
    return;
  }
  if (!busy_ && waiting_.empty()) {
    if (run_here(work, lock)) return;
    waiting_.push_front(work);  // What came meanwhile comes after it.
  } else {
    waiting_.push_back(work);
  }
  expect_thread();
  lock.unlock();
  changed_.notify_all();
  if (blocking) work->await_end();
}

void CallQueue::expect_thread() {
  if (at_hand_ > 0) return;
  threads_.emplace_back([this] { run(); });
  ++living_;
  ++at_hand_;
}

bool CallQueue::run_here(const WorkPtr& work, std::unique_lock<std::mutex>& lock) {
  busy_ = true;
  lock.unlock();
  bool ended = true;
  std::exception_ptr error;
  try {
    ended = work->run_here();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  if (!ended) return false;
  lock.unlock();
  changed_.notify_all();
  work->complete(std::move(error));
  return true;
}

void CallQueue::run_first(std::unique_lock<std::mutex>& lock) {
  const WorkPtr work = std::move(waiting_.front());
  waiting_.pop_front();
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    work->run_later();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  lock.unlock();
  changed_.notify_all();
  const bool has_callbacks = work->end(std::move(error));
  lock.lock();
  if (has_callbacks) run_callbacks(work, lock);
}

void CallQueue::call_back(const WorkPtr& work) {
  {
    const std::lock_guard lock(mutex_);
    to_call_back_.push_back(work);
    expect_thread();
  }
  changed_.notify_all();
}

// They may wait for what waits here, which another thread does meanwhile.
void CallQueue::run_callbacks(const WorkPtr& work, std::unique_lock<std::mutex>& lock) {
  --at_hand_;
  if (!waiting_.empty() || !to_call_back_.empty()) expect_thread();
  lock.unlock();
  work->run_callbacks();
  lock.lock();
  ++at_hand_;
}

void CallQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] {
      return !to_call_back_.empty() || (!busy_ && (closed_ || !waiting_.empty()));
    });
    if (!to_call_back_.empty()) {
      const WorkPtr work = std::move(to_call_back_.front());
      to_call_back_.pop_front();
      run_callbacks(work, lock);
    } else if (!waiting_.empty()) {
      run_first(lock);
    } else {
      break;
    }
  }
  --at_hand_;
  --living_;
  lock.unlock();
  changed_.notify_all();
}

void CallQueue::close() {
  bool is_own_thread = false;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_; });
    is_own_thread = std::any_of(threads_.begin(), threads_.end(), [](const std::thread& thread) {
      return thread.get_id() == std::this_thread::get_id();
    });
  }
  if (!is_own_thread) end_threads();
}

void CallQueue::end_threads() {
  std::vector<std::thread> ended;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_ && living_ == 0; });
    ended.swap(threads_);
  }
  for (auto& thread : ended) thread.join();
}

}  // namespace lockstep::backends
