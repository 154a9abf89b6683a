#pragma once

#include <cstddef>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Owns a file descriptor and closes it. Movable, not copyable.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

/// A new empty folder in `temporary_folder()`, removed with its content at destruction.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& prefix = "lockstep");
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Makes a folder whose new name starts with `prefix`. Unlike mkdtemp's it has the permissions that
/// every new folder of this process gets. Throws SystemError.
std::filesystem::path make_unique_folder(const std::filesystem::path& prefix);

/// The first line of a small file such as those of /proc and /sys, without its end. Empty where
/// there is none or the file cannot be read.
std::string first_line(const std::filesystem::path& path);

/// The whole content of a file. Throws SystemError naming the file, and DataError when it has more
/// than `most` bytes. What is no regular file may never end (/dev/zero): at most 16 MiB of it.
std::string read_file(const std::filesystem::path& path,
                      size_t most = std::numeric_limits<size_t>::max());

/// Writes the whole buffer, resuming after short writes and interrupts. Throws SystemError.
void write_all(int fd, const void* data, size_t size, const std::filesystem::path& name);

/// Flushes a file or a folder's entries to the disk. Throws SystemError. A folder on a file system
/// that cannot flush folders counts as flushed.
void fsync_path(const std::filesystem::path& path);

/// A file that becomes visible under its name only when it is complete. It is written beside its
/// target, flushed to the disk, and renamed over it by `commit()`. Without `commit()` nothing of it
/// stays. A reader sees the old content or the new one, never a part. A symbolic link is followed.
class AtomicFile {
 public:
  /// Throws what would keep the file from being written. Error: the target is there and is no
  /// regular file (a device, a pipe, a folder). SystemError: the folder is missing, or writing to
  /// it is not allowed.
  explicit AtomicFile(std::filesystem::path target);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t size);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// fsync of the file, rename, fsync of the folder. Throws SystemError (a full disk, ...), and
  /// then the target is as it was. After the rename nothing is thrown: where the folder cannot be
  /// flushed, a warning says so.
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path aside_;
  UniqueFd fd_;
};

/// Writes `content` through an AtomicFile.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

}  // namespace lockstep
