#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>

#include "lockstep/base/file.h"
#include "lockstep/rpc/fast_link.h"

namespace lockstep::rpc::detail {

/// Where threads of this process sleep until something can be read from or written to one of many
/// sockets, of which only the first of the threads is woken. Each has an eventfd of its own, and
/// the set of all sockets while it is the one to be woken. What can be read keeps that set ready,
/// so that a thread which begins to sleep late wakes at once. Any thread.
class SocketWaiters {
 public:
  using Waiter = FastLink::Waiter;
  /// Throws SystemError.
  SocketWaiters();
  SocketWaiters(const SocketWaiters&) = delete;
  SocketWaiters& operator=(const SocketWaiters&) = delete;

  /// The set (epoll) of all sockets. Their owner enters and removes them.
  int sockets() const { return sockets_.get(); }

  void begin_look();
  void end_look();
  void sleep(Waiter waiter, const std::function<bool()>& enough, std::chrono::nanoseconds limit);
  void wake(Waiter waiter);

 private:
  struct Sleeper {
    UniqueFd bell, both;  ///< An eventfd, and the set of it and perhaps of the sockets' set.
    bool sleeps = false, is_rung = false;
  };
  /// With the mutex: lets the sockets wake the one that they should.
  void choose();
  void let_wake(size_t waiter, bool wakes);

  UniqueFd sockets_;
  std::mutex mutex_;
  std::array<Sleeper, FastLink::kWaiters> sleepers_;
  int lookers_ = 0;
  std::optional<size_t> chosen_;
};

}  // namespace lockstep::rpc::detail
