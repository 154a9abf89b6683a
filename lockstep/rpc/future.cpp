#include "lockstep/rpc/future.h"

#include <algorithm>
#include <atomic>

#include "lockstep/base/duration.h"
#include "lockstep/base/text.h"
#include "lockstep/rpc/fast_path.h"
#include "lockstep/rpc/handler_threads.h"

namespace lockstep::rpc::detail {

using Clock = std::chrono::steady_clock;

bool CallState::complete(at::IValue value) {
  return finish(std::move(value), nullptr);
}

bool CallState::fail(std::exception_ptr error) {
  return finish({}, std::move(error));
}

bool CallState::finish(at::IValue value, std::exception_ptr error) {
  std::vector<std::function<void()>> callbacks;
  std::shared_ptr<void> counted;
  {
    const std::lock_guard lock(mutex_);
    if (done_) return false;
    counted.swap(counted_);
    value_ = std::move(value);
    error_ = std::move(error);
    done_.store(true, std::memory_order_seq_cst);
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  counted.reset();
  if (const auto driver = driver_.lock()) {
    driver->finished(*this);
    if (!callbacks.empty()) driver->run_elsewhere(weak_from_this().lock(), std::move(callbacks));
    return true;
  }
  for (const auto& callback : callbacks) callback();
  return true;
}

const at::IValue& CallState::value(std::optional<std::chrono::milliseconds> limit) const {
  if (!is_done()) {
    const HandlerThreads::Waiting waiting;
    if (!limit && ends_ == Ends::perhaps_not) limit = default_timeout();
    std::optional<Clock::time_point> end;
    if (limit) end = Clock::now() + std::min<std::chrono::milliseconds>(*limit, kLongestTimeout);
    if (const auto driver = driver_.lock()) driver->drive(*this, end);
    std::unique_lock lock(mutex_);
    const auto done = [&] { return done_.load(); };
    if (!end) {
      changed_.wait(lock, done);
    } else if (!changed_.wait_until(lock, *end, done)) {
      throw TimeoutError("rpc: waiting for a future timed out after " + seconds_text(*limit));
    }
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return value_;
}

void CallState::when_done(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void CallState::hold_until_done(std::shared_ptr<void> counted) {
  const std::lock_guard lock(mutex_);
  if (!done_) counted_ = std::move(counted);
}

bool CallState::cancel() {
  return fail(std::make_exception_ptr(CancelledError("rpc: the call was cancelled")));
}

std::shared_ptr<CallState> promised_state() {
  const auto state = std::make_shared<CallState>(CallState::Ends::perhaps_not);
  return {state.get(), [state](CallState*) {
            state->fail(std::make_exception_ptr(
                CancelledError("rpc: all promises of a result are gone, and none has given it")));
          }};
}

std::shared_ptr<CallState> all_states(const std::vector<std::shared_ptr<CallState>>& states) {
  const bool end = std::all_of(states.begin(), states.end(), [](const auto& state) {
    return state->ends() == CallState::Ends::by_itself;
  });
  auto all =
      std::make_shared<CallState>(end ? CallState::Ends::by_itself : CallState::Ends::perhaps_not);
  if (states.empty()) {
    all->complete({});
    return all;
  }
  auto left = std::make_shared<std::atomic<size_t>>(states.size());
  for (const auto& state : states) {
    state->when_done([all, left, part = std::weak_ptr(state)] {
      try {
        part.lock()->value({});
      } catch (...) {
        all->fail(std::current_exception());
      }
      if (left->fetch_sub(1) == 1) all->complete({});
    });
  }
  return all;
}

}  // namespace lockstep::rpc::detail
