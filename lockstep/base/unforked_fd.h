#pragma once

#include "lockstep/base/file.h"

namespace lockstep {

/// Owns a file descriptor that forked children do not keep. There it is closed also when the child
/// starts no other program, as a data loader's workers do. For locks and connections whose end
/// tells others that this process has ended.
class UnforkedFd {
 public:
  UnforkedFd() = default;
  ~UnforkedFd();
  UnforkedFd(const UnforkedFd&) = delete;
  UnforkedFd& operator=(const UnforkedFd&) = delete;

  /// As open(2) with O_CLOEXEC, in place of what it owned; false with `errno` when that fails.
  bool open(const char* path, int flags);
  /// Takes one over, in place of what it owned.
  void take(UniqueFd fd);
  /// Closes it.
  void reset();
  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }

 private:
  UniqueFd fd_;
};

}  // namespace lockstep
