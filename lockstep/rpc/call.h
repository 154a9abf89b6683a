#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/rref.h"

namespace lockstep::rpc {

/// Where a call goes, and how long it may take: "worker1", or {"worker1", 5s}.
struct Destination {
  Destination(const char* name) : worker(name) {}             // NOLINT: a plain name will do
  Destination(std::string name) : worker(std::move(name)) {}  // NOLINT
  Destination(std::string name, std::chrono::milliseconds limit)
      : worker(std::move(name)), timeout(limit) {}

  std::string worker;
  /// None: the agent's own (Options::timeout). Zero is refused: every call ends.
  std::optional<std::chrono::milliseconds> timeout;
};

namespace detail {
std::shared_ptr<CallState> send_call(const Destination& to, const Signature& signature,
                                     std::vector<at::IValue> arguments);
/// To the worker of a number, where a name may be another one's by now. Such calls are not counted:
/// a liveness call is pending as long as the other worker lives. Without a time-out it has none.
std::shared_ptr<CallState> send_call_to(int id, const Signature& signature,
                                        std::vector<at::IValue> arguments,
                                        std::chrono::milliseconds timeout = {});
RRefPtr send_remote(const Destination& to, const Signature& signature,
                    std::vector<at::IValue> arguments);
}  // namespace detail

/// Runs a function on a worker, this one included, and returns at once. Arguments are converted to
/// the function's types as in a plain call. Their tensors must not be changed until the call is
/// done. Throws UsageError without an agent and for an unknown worker; all else fails the future.
template <class R, class... A, class... Given>
auto call_async(const Destination& to, const Function<R(A...)>& function, Given&&... arguments) {
  using Result = Function<R(A...)>::Result;
  static_assert(std::is_void_v<Result> || Sendable<Result>,
                "the result's type cannot travel: call it by rpc::remote, which gives an RRef");
  return Future<Result>(detail::send_call(
      to, function.signature(), Function<R(A...)>::pack(std::forward<Given>(arguments)...)));
}

/// The same, and waits for the result. Throws as Future::wait.
template <class R, class... A, class... Given>
auto call(const Destination& to, const Function<R(A...)>& function, Given&&... arguments) {
  return call_async(to, function, std::forward<Given>(arguments)...).wait();
}

/// Runs a function on a worker, which keeps the result. Returns a reference to it at once, before
/// the function has run. Its failure is thrown by `to_here`.
template <class R, class... A, class... Given>
auto remote(const Destination& to, const Function<R(A...)>& function, Given&&... arguments) {
  using Result = Function<R(A...)>::Result;
  return RRef<typename detail::PointedTo<Result>::type>(detail::send_remote(
      to, function.signature(), Function<R(A...)>::pack(std::forward<Given>(arguments)...)));
}

template <class T>
template <class R, class... A, class... Given>
auto RRef<T>::rpc_sync(const Function<R(RRef<T>, A...)>& method, Given&&... arguments) const {
  return call(owner_name(), method, *this, std::forward<Given>(arguments)...);
}

template <class T>
template <class R, class... A, class... Given>
auto RRef<T>::rpc_async(const Function<R(RRef<T>, A...)>& method, Given&&... arguments) const {
  return call_async(owner_name(), method, *this, std::forward<Given>(arguments)...);
}

template <class T>
template <class R, class... A, class... Given>
auto RRef<T>::remote(const Function<R(RRef<T>, A...)>& method, Given&&... arguments) const {
  return rpc::remote(owner_name(), method, *this, std::forward<Given>(arguments)...);
}

}  // namespace lockstep::rpc
