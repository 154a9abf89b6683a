#include "lockstep/rpc/socket_waiters.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/error.h"

namespace lockstep::rpc::detail {
namespace {

/// Longer sleeps are cut: whoever sleeps looks again anyway.
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(1);

UniqueFd checked(int fd) {
  if (fd < 0) throw SystemError("rpc: making what threads sleep on", errno);
  return UniqueFd(fd);
}

void enter(int set, int fd, uint32_t events) {
  epoll_event event{events, {}};
  if (epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) != 0) {
    throw SystemError("rpc: making what threads sleep on", errno);
  }
}

}  // namespace

SocketWaiters::SocketWaiters() : sockets_(checked(epoll_create1(EPOLL_CLOEXEC))) {
  for (Sleeper& sleeper : sleepers_) {
    sleeper.bell = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    sleeper.both = checked(epoll_create1(EPOLL_CLOEXEC));
    enter(sleeper.both.get(), sleeper.bell.get(), EPOLLIN);
    enter(sleeper.both.get(), sockets_.get(), 0);
  }
}

void SocketWaiters::begin_look() {
  const std::lock_guard lock(mutex_);
  ++lookers_;
  choose();
}

void SocketWaiters::end_look() {
  const std::lock_guard lock(mutex_);
  --lookers_;
  choose();
}

void SocketWaiters::sleep(Waiter waiter, const std::function<bool()>& enough,
                          std::chrono::nanoseconds limit) {
  Sleeper& sleeper = sleepers_[waiter];
  {
    const std::lock_guard lock(mutex_);
    sleeper.sleeps = true;
    choose();
  }
  if (!enough()) {
    const auto most =
        std::clamp<std::chrono::milliseconds>(std::chrono::ceil<std::chrono::milliseconds>(limit),
                                              std::chrono::milliseconds(0), kLongest);
    epoll_event event{};
    epoll_wait(sleeper.both.get(), &event, 1, static_cast<int>(most.count()));
  }
  const std::lock_guard lock(mutex_);
  sleeper.sleeps = false;
  if (sleeper.is_rung) {  // Nobody rings for one that does not sleep.
    uint64_t rings = 0;
    static_cast<void>(read(sleeper.bell.get(), &rings, sizeof(rings)) < 0);
    sleeper.is_rung = false;
  }
  choose();
}

void SocketWaiters::wake(Waiter waiter) {
  const std::lock_guard lock(mutex_);
  if (!sleepers_[waiter].sleeps || sleepers_[waiter].is_rung) return;
  sleepers_[waiter].is_rung = true;
  const uint64_t once = 1;
  static_cast<void>(write(sleepers_[waiter].bell.get(), &once, sizeof(once)) < 0);
}

void SocketWaiters::choose() {
  std::optional<size_t> wanted;
  for (size_t i = 0; i < sleepers_.size() && lookers_ == 0 && !wanted; ++i) {
    if (sleepers_[i].sleeps) wanted = i;
  }
  if (wanted == chosen_) return;
  if (chosen_) let_wake(*chosen_, false);
  if (wanted) let_wake(*wanted, true);
  chosen_ = wanted;
}

void SocketWaiters::let_wake(size_t waiter, bool wakes) {
  epoll_event event{wakes ? uint32_t{EPOLLIN} : 0U, {}};
  epoll_ctl(sleepers_[waiter].both.get(), EPOLL_CTL_MOD, sockets_.get(), &event);
}

}  // namespace lockstep::rpc::detail
