#include "lockstep/comm/backends/hierarchical/call_queue.h"

#include "lockstep/base/error.h"

namespace lockstep::hierarchical {

void CallQueue::submit(const WorkPtr& work, Body body, bool blocking) {
  std::unique_lock lock(mutex_);
  if (closed_) {
    lock.unlock();
    work->complete(std::make_exception_ptr(
        CommError(work->text() + " comes after the group was closed", "keep the World alive")));
    return;
  }
  if (blocking && !busy_ && waiting_.empty()) return run_call({work, std::move(body)}, lock);
  waiting_.push_back({work, std::move(body)});
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (blocking && std::this_thread::get_id() == thread_.get_id()) {
    // A callback of an earlier call: this thread is the one that gets to it.
    while (!waiting_.empty() && !work->isCompleted()) {
      const Call next = std::move(waiting_.front());
      waiting_.pop_front();
      run_call(next, lock);
    }
    return;
  }
  lock.unlock();
  changed_.notify_all();
  if (blocking) work->await_end();
}

void CallQueue::run_call(const Call& call, std::unique_lock<std::mutex>& lock) {
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    hierarchy_.run(*call.work, call.work->timeout(), [&] { call.body(hierarchy_); });
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  changed_.notify_all();
  lock.unlock();
  call.work->complete(error);
  lock.lock();
}

void CallQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !busy_ && (closed_ || !waiting_.empty()); });
    if (waiting_.empty()) return;
    const Call next = std::move(waiting_.front());
    waiting_.pop_front();
    run_call(next, lock);
  }
}

void CallQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace lockstep::hierarchical
