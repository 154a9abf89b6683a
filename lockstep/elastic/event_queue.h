#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep::elastic {

/// Events from any threads for one that reads them, which may wait in poll for `descriptor()`.
template <class Event>
class EventQueue {
 public:
  EventQueue() : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw SystemError("eventfd", errno);
  }

  void push(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    ::eventfd_write(wake_.get(), 1);
    arrived_.notify_one();
  }

  /// The first event; waits for it for at most `timeout`.
  std::optional<Event> take(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, timeout, [&] { return !events_.empty(); })) return std::nullopt;
    std::optional<Event> event(std::move(events_.front()));
    events_.pop_front();
    eventfd_t count = 0;
    if (events_.empty()) ::eventfd_read(wake_.get(), &count);
    return event;
  }

  /// Readable while events wait.
  int descriptor() const { return wake_.get(); }

 private:
  const UniqueFd wake_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Event> events_;
};

}  // namespace lockstep::elastic
