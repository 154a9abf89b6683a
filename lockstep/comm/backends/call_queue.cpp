#include "lockstep/comm/backends/call_queue.h"

#include "lockstep/base/error.h"

namespace lockstep::backends {

void CallQueue::submit(const WorkPtr& work) {
  const bool blocking = !work->request().async;
  std::unique_lock lock(mutex_);
  if (closed_) {
    lock.unlock();
    work->complete(std::make_exception_ptr(
        CommError(work->text() + " comes after the group was closed", "keep the World alive")));
    return;
  }
  if (!busy_ && waiting_.empty()) {
    if (run_here(work, lock)) return;
    waiting_.push_front(work);  // What came meanwhile comes after it.
  } else {
    waiting_.push_back(work);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (blocking && std::this_thread::get_id() == thread_.get_id()) {
    // A callback of an earlier call: this thread is the one that gets to it.
    while (!waiting_.empty() && !work->isCompleted()) {
      changed_.wait(lock, [this] { return !busy_; });
      run_first(lock);
    }
    return;
  }
  lock.unlock();
  changed_.notify_all();
  if (blocking) work->await_end();
}

bool CallQueue::run_here(const WorkPtr& work, std::unique_lock<std::mutex>& lock) {
  busy_ = true;
  lock.unlock();
  bool ended = true;
  std::exception_ptr error;
  try {
    ended = steps_.here(*work, !work->request().async);
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
    steps_.later(*work);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  changed_.notify_all();
  lock.unlock();
  work->complete(std::move(error));
  lock.lock();
}

void CallQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !busy_ && (closed_ || !waiting_.empty()); });
    if (waiting_.empty()) return;
    run_first(lock);
  }
}

void CallQueue::close() {
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_; });
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace lockstep::backends
