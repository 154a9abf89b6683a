#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {

/// Holds the mutex of Messages. At its end it lets go and tells of what has finished meanwhile.
class Messages::Lock {
 public:
  explicit Lock(Messages& messages) : messages_(messages), lock_(messages.mutex_) {}
  Lock(Messages& messages, std::try_to_lock_t how)
      : messages_(messages), lock_(messages.mutex_, how) {}
  ~Lock() {
    if (!lock_.owns_lock() || messages_.finished_.empty()) return;
    const std::vector<MessagePtr> finished = std::exchange(messages_.finished_, {});
    lock_.unlock();
    messages_.settle(finished);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

 private:
  Messages& messages_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace lockstep::shm
