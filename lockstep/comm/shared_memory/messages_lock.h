#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include "lockstep/comm/shared_memory/messages.h"

namespace lockstep::shm {

/// Holds the mutex of Messages. At its end it lets go and tells of what has finished meanwhile.
class Messages::Lock {
 public:
  /// `waited`: the message that this thread waits for, if any.
  explicit Lock(Messages& messages, const Message* waited = nullptr)
      : messages_(messages), waited_(waited), lock_(messages.mutex_) {}
  Lock(Messages& messages, std::try_to_lock_t how, const Message* waited)
      : messages_(messages), waited_(waited), lock_(messages.mutex_, how) {}
  ~Lock() {
    if (!lock_.owns_lock() || messages_.finished_.empty()) return;
    const std::vector<MessagePtr> finished = std::exchange(messages_.finished_, {});
    lock_.unlock();
    messages_.settle(finished, waited_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  explicit operator bool() const { return lock_.owns_lock(); }

 private:
  Messages& messages_;
  const Message* const waited_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace lockstep::shm
