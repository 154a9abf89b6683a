#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/rpc/value.h"

namespace lockstep::rpc {

/// A function failed on the worker that ran it. `what()` says which function, where, and the
/// exception's type and message.
class RemoteError : public Error {
 public:
  RemoteError(std::string worker, std::string function, std::string type, std::string message);

  /// The worker on which the exception was thrown. For nested calls it is the innermost worker, and
  /// the type and message are of its exception.
  const std::string& worker() const noexcept { return worker_; }
  const std::string& function() const noexcept { return function_; }
  /// The exception's C++ type: "std::out_of_range", "lockstep::UsageError".
  const std::string& type() const noexcept { return type_; }
  /// The exception's own `what()`.
  const std::string& message() const noexcept { return message_; }

 private:
  std::string worker_, function_, type_, message_;
};

/// The call was given up by `Future::cancel`.
class CancelledError : public Error {
 public:
  using Error::Error;
};

template <class T>
class Future;

namespace detail {

/// How long a wait without a limit takes where nothing else ends it: the worker's Options::timeout,
/// else 60 s.
std::chrono::milliseconds default_timeout();

class FastPath;

/// What a call's futures share: a value, once it is there, or an error. Any thread.
class CallState : public std::enable_shared_from_this<CallState> {
 public:
  enum class Ends {
    by_itself,    ///< A call's, which has a time-out.
    perhaps_not,  ///< Someone is to complete it.
  };
  explicit CallState(Ends ends = Ends::by_itself, std::weak_ptr<FastPath> driver = {})
      : ends_(ends), driver_(std::move(driver)) {}
  Ends ends() const { return ends_; }

  /// The first of these counts and returns true.
  bool complete(at::IValue value);
  bool fail(std::exception_ptr error);

  bool is_done() const { return done_.load(std::memory_order_seq_cst); }
  /// Waits; throws the error. None: until the call ends, else for `default_timeout`.
  const at::IValue& value(std::optional<std::chrono::milliseconds> limit) const;
  /// Runs `callback` once when it is done: on the thread that does it, where its driver says, or
  /// now.
  void when_done(std::function<void()> callback);
  /// Lets go of it as soon as it is done, before callbacks run. Its end must be quick.
  void hold_until_done(std::shared_ptr<void> counted);
  bool cancel();

 private:
  bool finish(at::IValue value, std::exception_ptr error);

  const Ends ends_;
  const std::weak_ptr<FastPath> driver_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> done_{false};
  at::IValue value_;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
  std::shared_ptr<void> counted_;
};

/// A state that its promises are to complete. The end of this pointer's last copy fails it, unless
/// it is done.
std::shared_ptr<CallState> promised_state();

/// Runs `work` and puts what it returns, or throws, into `state`.
template <class T, class F>
void complete_with(CallState& state, F&& work) noexcept {
  try {
    if constexpr (std::is_void_v<T>) {
      work();
      state.complete({});
    } else {
      state.complete(Value<T>::to(work()));
    }
  } catch (...) {
    state.fail(std::current_exception());
  }
}

}  // namespace detail

/// The result of a call that is under way. A handle, whose copies share the call. Any thread.
template <class T>
class Future {
 public:
  Future() = default;
  explicit Future(std::shared_ptr<detail::CallState> state) : state_(std::move(state)) {}

  /// Blocks until the result is there and returns it; throws what the call failed with:
  /// - RemoteError: the function threw,
  /// - TimeoutError: no answer within the call's time-out,
  /// - PeerLostError: the worker died or has left,
  /// - MismatchError: the two ends know the function by different types,
  /// - CancelledError.
  ///
  /// Each call ends by its own time-out. `limit` ends only this wait, by a TimeoutError. Without
  /// one a wait for a Promise's result ends after Options::timeout.
  T wait(std::optional<std::chrono::milliseconds> limit = std::nullopt) const {
    if constexpr (std::is_void_v<T>) {
      state_->value(limit);
    } else {
      return Value<T>::from(state_->value(limit));
    }
  }
  bool is_done() const { return state_->is_done(); }

  /// A future of what `next(future)` returns. `next` runs when this one is done, also after a
  /// failure, which `future.wait()` then throws. It runs on a thread of this worker's, or now when
  /// the call is done. It must not wait for other calls.
  template <class F>
  auto then(F next) const -> Future<std::invoke_result_t<F, Future<T>>> {
    using R = std::invoke_result_t<F, Future<T>>;
    auto result = std::make_shared<detail::CallState>(state_->ends());
    // Not the state itself, which keeps the callback: that would be a circle. Who completes the
    // state holds it.
    state_->when_done([state = std::weak_ptr(state_), result, next = std::move(next)]() mutable {
      detail::complete_with<R>(*result, [&] { return next(Future<T>(state.lock())); });
    });
    return Future<R>(result);
  }

  /// Gives the call up: all that wait get a CancelledError, and a late answer is dropped. The
  /// function may run to its end. False when the call was done already.
  bool cancel() const { return state_->cancel(); }

  explicit operator bool() const { return state_ != nullptr; }
  const std::shared_ptr<detail::CallState>& state() const { return state_; }

 private:
  std::shared_ptr<detail::CallState> state_;
};

/// A result that someone gives later: a function registered with `rpc::function` may return
/// `promise.future()`, and so frees its thread. Copies share the result. When the last one is gone
/// without a result, the future fails by CancelledError. Any thread.
template <class T>
class Promise {
 public:
  Promise() : state_(detail::promised_state()) {}
  Future<T> future() const { return Future<T>(state_->shared_from_this()); }
  /// Only the first of these counts; returns false for the others.
  template <class U = T>
  requires(!std::is_void_v<U>) bool set_value(U value) const {
    return state_->complete(Value<T>::to(std::move(value)));
  }
  bool set_value() const requires std::is_void_v<T> { return state_->complete({}); }
  bool set_exception(std::exception_ptr error) const { return state_->fail(std::move(error)); }

 private:
  std::shared_ptr<detail::CallState> state_;
};

namespace detail {
std::shared_ptr<CallState> all_states(const std::vector<std::shared_ptr<CallState>>& states);
}

/// Done when all are, with their results in the same order. Fails as soon as one does.
template <class T>
auto when_all(std::vector<Future<T>> futures) {
  std::vector<std::shared_ptr<detail::CallState>> states;
  for (const auto& future : futures) states.push_back(future.state());
  const Future<void> all(detail::all_states(states));
  if constexpr (std::is_void_v<T>) {
    return all;
  } else {
    return all.then([futures = std::move(futures)](const Future<void>& done) {
      done.wait();
      std::vector<T> results;
      for (const auto& future : futures) results.push_back(future.wait());
      return results;
    });
  }
}

}  // namespace lockstep::rpc
