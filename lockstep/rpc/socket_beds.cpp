#include "lockstep/rpc/socket_beds.h"

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

SocketBeds::SocketBeds() : sockets_(checked(epoll_create1(EPOLL_CLOEXEC))) {
  for (Place& place : places_) {
    place.bell = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    place.both = checked(epoll_create1(EPOLL_CLOEXEC));
    enter(place.both.get(), place.bell.get(), EPOLLIN);
    enter(place.both.get(), sockets_.get(), 0);
  }
}

void SocketBeds::begin_look() {
  const std::lock_guard lock(mutex_);
  ++lookers_;
  choose();
}

void SocketBeds::end_look() {
  const std::lock_guard lock(mutex_);
  --lookers_;
  choose();
}

void SocketBeds::sleep(Bed bed, const std::function<bool()>& enough,
                       std::chrono::nanoseconds limit) {
  Place& place = places_[bed];
  {
    const std::lock_guard lock(mutex_);
    place.is_taken = true;
    choose();
  }
  if (!enough()) {
    const auto most =
        std::clamp<std::chrono::milliseconds>(std::chrono::ceil<std::chrono::milliseconds>(limit),
                                              std::chrono::milliseconds(0), kLongest);
    epoll_event event{};
    epoll_wait(place.both.get(), &event, 1, static_cast<int>(most.count()));
  }
  const std::lock_guard lock(mutex_);
  place.is_taken = false;
  if (place.is_rung) {  // Nobody rings for a bed that is not taken.
    uint64_t rings = 0;
    static_cast<void>(read(place.bell.get(), &rings, sizeof(rings)) < 0);
    place.is_rung = false;
  }
  choose();
}

void SocketBeds::wake(Bed bed) {
  const std::lock_guard lock(mutex_);
  if (!places_[bed].is_taken || places_[bed].is_rung) return;
  places_[bed].is_rung = true;
  const uint64_t once = 1;
  static_cast<void>(write(places_[bed].bell.get(), &once, sizeof(once)) < 0);
}

void SocketBeds::choose() {
  std::optional<size_t> wanted;
  for (size_t i = 0; i < places_.size() && lookers_ == 0 && !wanted; ++i) {
    if (places_[i].is_taken) wanted = i;
  }
  if (wanted == chosen_) return;
  if (chosen_) let_wake(*chosen_, false);
  if (wanted) let_wake(*wanted, true);
  chosen_ = wanted;
}

void SocketBeds::let_wake(size_t place, bool wakes) {
  epoll_event event{wakes ? uint32_t{EPOLLIN} : 0U, {}};
  epoll_ctl(places_[place].both.get(), EPOLL_CTL_MOD, sockets_.get(), &event);
}

}  // namespace lockstep::rpc::detail
