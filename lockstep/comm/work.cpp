#include "lockstep/comm/work.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/flight_recorder.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/work_state.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
thread_local Clock::duration in_waits{};

struct WaitTimer {
  const Clock::time_point begin = Clock::now();
  ~WaitTimer() { in_waits += Clock::now() - begin; }
};

}  // namespace

std::chrono::nanoseconds time_held_up() {
  return FlightRecorder::time_in_calls() + in_waits;
}

namespace detail {

struct WaiterPool::Waiter {
  std::function<void()> abort;
  std::atomic<bool> finished{false};
  std::thread thread;
};

WaiterPool::WaiterPool() = default;
WaiterPool::~WaiterPool() {
  close();
}

void WaiterPool::start(std::function<void()> wait, std::function<void()> abort) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw CommError("the group of this operation is closed");
  std::erase_if(waiters_, [](const std::unique_ptr<Waiter>& waiter) {
    const bool finished = waiter->finished;  // Read once: only what was joined may go.
    if (finished) waiter->thread.join();
    return finished;
  });
  auto waiter = std::make_unique<Waiter>();
  waiter->abort = std::move(abort);
  waiter->thread = std::thread([raw = waiter.get(), wait = std::move(wait)] {
    wait();
    raw->finished = true;
  });
  waiters_.push_back(std::move(waiter));
}

void WaiterPool::close() noexcept {
  std::vector<std::unique_ptr<Waiter>> waiters;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    waiters.swap(waiters_);
  }
  for (auto& waiter : waiters) {
    if (!waiter->finished) waiter->abort();
  }
  for (auto& waiter : waiters) waiter->thread.join();
}

WorkState::WorkState(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> outputs,
                     std::vector<at::Tensor> kept_alive, std::shared_ptr<WaiterPool> pool)
    : work_(std::move(work)),
      outputs_(std::move(outputs)),
      kept_alive_(std::move(kept_alive)),
      pool_(pool),
      needs_waiter_(pool != nullptr) {}

WorkState::~WorkState() = default;

void WorkState::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (!work_) return;
  std::optional<WaitTimer> timer;
  if (!work_->isCompleted()) timer.emplace();
  if (!needs_waiter_) {
    translated([&] { work_->wait(timeout.value_or(kNoTimeout)); });
    return;
  }
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return done_; };
  if (timeout) {
    // Not by the backend's own time-out, which ends more than this wait: Gloo breaks the group.
    if (!done_) start_waiter();
    if (!done_changed_.wait_for(lock, *timeout, is_done)) throw_short_wait(*timeout);
  } else if (!claimed_) {
    claimed_ = true;
    lock.unlock();
    run_wait();
    lock.lock();
  } else {
    done_changed_.wait(lock, is_done);
  }
  if (error_) std::rethrow_exception(error_);
}

void WorkState::throw_short_wait(std::chrono::milliseconds timeout) const {
  throw TimeoutError(to_lower(c10d::opTypeToString(work_->retrieveOpType())) +
                         " is not finished after " + seconds_text(timeout) + "; it goes on",
                     "wait again, or longer. Until then its tensors are in use");
}

void WorkState::run_wait() {
  std::exception_ptr error;
  try {
    translated([&] {
      if (!work_->wait(kNoTimeout)) throw CommError("the group of this message was closed");
    });
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
}

void WorkState::finish(std::exception_ptr error) {
  std::vector<std::function<void(std::exception_ptr)>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = error;
    callbacks.swap(callbacks_);
  }
  done_changed_.notify_all();
  for (auto& callback : callbacks) callback(error);
}

void WorkState::start_waiter() {
  if (claimed_) return;
  const auto pool = pool_.lock();
  if (!pool) throw CommError("the group of this operation is closed");
  // Under the lock: the thread takes it only once the operation has ended.
  pool->start([self = shared_from_this()] { self->run_wait(); },
              [work = work_] {
                try {
                  work->abort();
                } catch (const std::exception&) {
                  // It ended meanwhile.
                }
              });
  claimed_ = true;
}

bool WorkState::is_completed() {
  if (!work_) return true;
  if (!needs_waiter_) return work_->isCompleted();
  const std::lock_guard lock(mutex_);
  if (!done_) start_waiter();
  return done_;
}

void WorkState::then(std::function<void(std::exception_ptr)> callback) {
  if (!work_) return callback(nullptr);
  if (!needs_waiter_) {
    translated([&] {
      return work_->getFuture();
    })->addCallback([callback = std::move(callback)](c10::ivalue::Future& future) {
      callback(future.hasError() ? translate(future.exception_ptr()) : nullptr);
    });
    return;
  }
  std::unique_lock lock(mutex_);
  if (done_) {
    lock.unlock();
    callback(error_);
    return;
  }
  start_waiter();
  callbacks_.push_back(std::move(callback));
}

}  // namespace detail

detail::WorkState& Work::state() const {
  if (!state_) throw UsageError("work: an empty handle");
  return *state_;
}

void Work::wait(std::optional<std::chrono::milliseconds> timeout) const {
  if (timeout) check_timeout("wait", *timeout);
  state().wait(timeout);
}

bool Work::is_completed() const {
  return state().is_completed();
}

void Work::then(std::function<void(std::exception_ptr)> callback) const {
  state().then(std::move(callback));
}

std::vector<at::Tensor> Work::result() const {
  return state().outputs();
}

}  // namespace lockstep
