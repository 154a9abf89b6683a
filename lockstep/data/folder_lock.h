#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>

#include "lockstep/base/file.h"
#include "lockstep/base/unforked_fd.h"

namespace lockstep {

/// Lets one process of a host at a time fill a folder, while the others wait for it to be filled.
/// The lock ends with its owner, however that ends, also where a forked child lives on. Its file
/// (".lockstep.lock") is removed then.
class FolderLock {
 public:
  struct Options {
    /// How long to wait in all.
    std::chrono::milliseconds timeout{600'000};
    /// How long to leave it to others even if the lock is free. Ranks other than a host's first one
    /// wait, so that the first one does the work and shows the progress.
    std::chrono::milliseconds patience{0};
  };

  /// Waits until `filled()` (then returns nothing) or until this process holds the lock. Makes the
  /// folder where it is missing.
  /// Throws TimeoutError, SystemError (a read-only folder).
  static std::unique_ptr<FolderLock> acquire(const std::filesystem::path& folder,
                                             const std::function<bool()>& filled,
                                             const Options& options);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  FolderLock(UniqueFd fd, std::filesystem::path path) : path_(std::move(path)) {
    fd_.take(std::move(fd));
  }
  static std::unique_ptr<FolderLock> try_acquire(const std::filesystem::path& path);

  UnforkedFd fd_;
  std::filesystem::path path_;
};

/// Makes the folder where it is missing, and fills it with `fill` unless it is `filled()`. One
/// process of this host does that, its first rank if that comes within 10 s, and the others wait
/// for it. Where that fails, removes the folders that it made and that are empty. Throws as
/// FolderLock::acquire and `fill`.
void fill_folder(const std::filesystem::path& folder, const std::function<bool()>& filled,
                 const std::function<void()>& fill, std::chrono::milliseconds timeout);

}  // namespace lockstep
