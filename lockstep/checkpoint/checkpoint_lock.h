#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "lockstep/base/unforked_fd.h"

namespace lockstep {

/// Keeps a folder for one process at a time. The kernel holds the lock, on the file `.in-use`, so
/// it ends with its owner, however that ends. The file says who that is. It is removed with the
/// lock, and what a killed owner left of it is taken over.
///
/// Some network file systems have no locks, or keep them on one host. So where the file names a
/// process of another host, a warning says that it may still write.
class CheckpointLock {
 public:
  /// Throws FolderInUseError when another process still has it after `patience`: one that was just
  /// killed takes a moment to end. None when another object of this process has it. Throws
  /// SystemError when the file cannot be made.
  static std::unique_ptr<CheckpointLock> acquire(
      const std::filesystem::path& folder,
      std::chrono::milliseconds patience = std::chrono::seconds(2));
  ~CheckpointLock();
  /// False when somebody has removed the file, so that others see the folder as free.
  bool is_in_place() const;
  CheckpointLock(const CheckpointLock&) = delete;
  CheckpointLock& operator=(const CheckpointLock&) = delete;

 private:
  explicit CheckpointLock(std::filesystem::path path) : path_(std::move(path)) {}

  UnforkedFd fd_;
  std::filesystem::path path_;
  int64_t process_ = 0;  ///< The one that has taken it. A forked child must not remove the file.
};

}  // namespace lockstep
