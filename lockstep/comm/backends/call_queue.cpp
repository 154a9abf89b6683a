#include "lockstep/comm/backends/call_queue.h"

#include <system_error>

#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/callback_scope.h"

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
  if (!expect_thread()) run_up_to(work, lock);
  lock.unlock();
  changed_.notify_all();
  if (blocking) work->await_end();
}

bool CallQueue::expect_thread() {
  if (at_hand_ > 0) return true;
  try {
    threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {
    return false;
  }
  ++living_;
  ++at_hand_;
  return true;
}

void CallQueue::run_up_to(const WorkPtr& work, std::unique_lock<std::mutex>& lock) {
  while (!waiting_.empty() && !work->isCompleted()) {
    changed_.wait(lock, [this] { return !busy_; });
    if (!waiting_.empty()) run_first(lock, Runner::submitter);
  }
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

bool CallQueue::end_first(std::unique_lock<std::mutex>& lock, const WorkPtr& work) {
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
  lock.unlock();
  changed_.notify_all();
  const bool has_callbacks = work->end(std::move(error));
  lock.lock();
  return has_callbacks;
}

void CallQueue::run_first(std::unique_lock<std::mutex>& lock, Runner runner) {
  std::vector<WorkPtr> to_call;
  bool alone = false;
  // The callbacks may wait for what waits here: where no other thread gets to it, it comes first.
  // What others submit while no thread is at hand they run themselves.
  do {
    const WorkPtr work = std::move(waiting_.front());
    waiting_.pop_front();
    if (end_first(lock, work)) to_call.push_back(work);
    if (to_call.empty()) return;
    if (runner == Runner::submitter) break;
    if (!alone) --at_hand_;
    alone = !waiting_.empty() && !busy_ && !expect_thread();
  } while (alone);
  lock.unlock();
  for (const WorkPtr& work : to_call) work->run_callbacks();
  lock.lock();
  if (runner == Runner::own_thread) ++at_hand_;
}

void CallQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !busy_ && (closed_ || !waiting_.empty()); });
    if (waiting_.empty()) break;
    run_first(lock, Runner::own_thread);
  }
  --at_hand_;
  --living_;
  lock.unlock();
  changed_.notify_all();
}

void CallQueue::close() {
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_; });
  }
  if (!shm::CallbackScope::active()) end_threads();
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
