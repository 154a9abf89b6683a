#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {

/// What a replica of a DataParallel threw, in forward or in backward. The message names the replica
/// and its device, and holds the message of the cause.
class ReplicaError : public Error {
 public:
  ReplicaError(size_t replica, c10::Device device, const std::string& message,
               std::exception_ptr cause, int exit_code);
  size_t replica() const { return replica_; }
  c10::Device device() const { return device_; }
  /// The exception itself, of its own type.
  const std::exception_ptr& cause() const { return cause_; }
  /// The cause's.
  int exit_code() const noexcept override { return exit_code_; }

 private:
  size_t replica_;
  c10::Device device_;
  std::exception_ptr cause_;
  int exit_code_;
};

namespace detail {

/// A thread for each replica, which stay from call to call.
class ReplicaThreads {
 public:
  /// `threads_each`: LibTorch's threads for the operations of one replica, where devices are CPUs.
  /// 0: those of the caller in equal parts, at least 1.
  explicit ReplicaThreads(std::vector<c10::Device> devices, int threads_each = 0);
  ~ReplicaThreads();
  ReplicaThreads(const ReplicaThreads&) = delete;
  ReplicaThreads& operator=(const ReplicaThreads&) = delete;

  const std::vector<c10::Device>& devices() const;
  int threads_each() const;

  /// Calls `work(i)` on the thread of replica i for all i below `count`, and waits for all. The
  /// threads have the caller's thread-local state: grad mode, autocast, current streams. When some
  /// have failed, the first one's failure is thrown as a ReplicaError. Any thread may call, except
  /// these.
  void run(size_t count, const std::function<void(size_t)>& work);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail
}  // namespace lockstep
