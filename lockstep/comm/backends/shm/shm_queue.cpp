#include "lockstep/comm/backends/shm/shm_queue.h"

#include "lockstep/base/error.h"

namespace lockstep::shm {

void ShmQueue::submit(const c10::intrusive_ptr<ShmWork>& work, bool blocking) {
  std::exception_ptr error;
  std::unique_lock lock(mutex_);
  if (closed_) {
    lock.unlock();
    work->complete(std::make_exception_ptr(
        CommError(work->text() + " comes after the group was closed", "keep the World alive")));
    return;
  }
  const bool ahead = !waiting_.empty() || busy_;
  if (!ahead && run_here(work, blocking, error)) {
    lock.unlock();
    work->complete(error);
    return;
  }
  waiting_.push_back(work);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (blocking && std::this_thread::get_id() == thread_.get_id()) {
    // A callback of an earlier call: this thread is the one that gets to it.
    while (!waiting_.empty() && !work->isCompleted()) run_first(lock);
    return;
  }
  lock.unlock();
  changed_.notify_one();
  if (blocking) work->await_end();
}

/// True when the call has ended.
bool ShmQueue::run_here(const c10::intrusive_ptr<ShmWork>& work, bool blocking,
                        std::exception_ptr& error) {
  if (!blocking && work->bytes > options_.inline_bytes) return false;
  try {
    work->begun = true;
    start(group_, *work, work->plan());
    if (!blocking && !group_.all_here(group_.spin())) return false;
    finish(group_, *work, work->plan(), work->timeout(),
           blocking ? Waiter::caller : Waiter::thread);
  } catch (...) {
    error = std::current_exception();
  }
  return true;
}

void ShmQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    run_first(lock);
  }
}

void ShmQueue::run_first(std::unique_lock<std::mutex>& lock) {
  const auto work = std::move(waiting_.front());
  waiting_.pop_front();
  busy_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    if (!work->begun) start(group_, *work, work->plan());
    finish(group_, *work, work->plan(), work->timeout());
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  busy_ = false;
  lock.unlock();
  work->complete(error);
  lock.lock();
}

void ShmQueue::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace lockstep::shm
