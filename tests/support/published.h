#pragma once

#include <mutex>
#include <utility>

namespace lockstep::test {

/// For tests whose ranks are threads: what one of them gives to the others. These wait by a
/// collective, whose shared memory each rank has at another address: ThreadSanitizer does not see
/// that they do.
template <class T>
class Published {
 public:
  void set(T value) {
    const std::lock_guard lock(mutex_);
    value_ = std::move(value);
  }
  T get() const {
    const std::lock_guard lock(mutex_);
    return value_;
  }

 private:
  mutable std::mutex mutex_;
  T value_;
};

}  // namespace lockstep::test
