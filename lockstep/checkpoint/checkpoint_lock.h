#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/base/unforked_fd.h"

namespace lockstep {

/// What a lock's file says of the process that holds it.
struct LockOwner {
  std::string host;
  int64_t process = 0;
  std::string program;
  std::string since;     ///< "2026-11-22 10:23:38 UTC".
  std::string identity;  ///< See process_identity.
};

/// This process, as an owner from now on.
LockOwner this_process();

/// False for a file system whose locks may hold on one host only, while other hosts write to the
/// same files. `type` and `options` are those of /proc/self/mountinfo.
bool locks_reach_all_hosts(const std::string& type, const std::string& options);

/// How far a lock that the kernel grants can be relied upon.
enum class LockReach {
  none,       ///< The file system has no locks.
  this_host,  ///< Processes of other hosts may hold one, too.
  all_hosts,
};

/// Whether the process that a lock's file names may still be at work although the kernel did not
/// refuse the lock.
bool may_be_at_work(const LockOwner& owner, const LockOwner& self, LockReach reach);

/// Keeps a folder for one process at a time. The kernel holds the lock, on the file `.in-use`, so
/// it ends with its owner, however that ends. The file says who that is. It is removed with the
/// lock, and what a killed owner left of it is taken over.
///
/// Where the kernel's lock does not reach other hosts (some network file systems), the file alone
/// must be believed: an owner on another host then counts as at work until somebody removes it.
class CheckpointLock {
 public:
  /// Throws FolderInUseError when another process still has it after `patience`: one that was just
  /// killed takes a moment to end. None when another object of this process has it. Throws
  /// SystemError when the file cannot be made. `reach` is looked up where it is not given.
  static std::unique_ptr<CheckpointLock> acquire(
      const std::filesystem::path& folder,
      std::chrono::milliseconds patience = std::chrono::seconds(2),
      std::optional<LockReach> reach = {});
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
