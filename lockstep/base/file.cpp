#include "lockstep/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file_size_limit.h"
#include "lockstep/base/log.h"
#include "lockstep/base/temporary_folder.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

fs::path folder_of(const fs::path& file) {
  const fs::path parent = file.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

/// Where a rename must put a new file so that `path` shows it: a link is followed. What is no file
/// (a device, a pipe, a folder) would be replaced by one, so it is refused.
fs::path file_behind(fs::path path) {
  constexpr int kMostLinks = 40;  // as the kernel follows
  std::error_code ignored;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, ignored); ++i) {
    path = folder_of(path) / fs::read_symlink(path);  // an absolute link replaces the folder
  }
  const fs::file_status status = fs::status(path, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error("cannot write " + path.string() + ": it is there and is no regular file",
                "give the name of a file");
  }
  return path;
}

/// Tries `make(path)` for names that start with `prefix` until one is not taken yet; empty, with
/// errno set, when it fails. `make` returns a negative number then. Unlike with mkstemp, the umask
/// decides who may read what is made.
template <class Make>
fs::path make_unique(const std::string& prefix, const Make& make) {
  constexpr int kMostTries = 100;
  for (int i = 0; i < kMostTries; ++i) {
    const std::string name = prefix + "." + random_hex(3);
    if (make(name) >= 0) return name;
    if (errno != EEXIST) break;
  }
  return {};
}

/// Of the name of a file beside `target`: not longer than a name may be, with what is added to it.
std::string name_beside(const fs::path& target) {
  constexpr size_t kMostBytes = 200;
  return (folder_of(target) / ("." + target.filename().string().substr(0, kMostBytes))).string();
}

/// The file is in place already, so a failure is no reason to take it for not written.
void flush_folder_of(const fs::path& file) {
  try {
    fsync_path(folder_of(file));
  } catch (const SystemError& error) {
    log_warning(file.string() + " is written, but a loss of power may undo that: " + error.what());
  }
}

/// A disk may take smaller or other pieces through the cache only. Whether that was so.
bool leave_direct_writes(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return (flags & O_DIRECT) != 0 && ::fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) reset(other.release());
  return *this;
}

int UniqueFd::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

TemporaryDirectory::TemporaryDirectory(const std::string& prefix) {
  std::string pattern = (temporary_folder() / (prefix + ".XXXXXX")).string();
  if (!::mkdtemp(pattern.data())) throw SystemError("cannot make folder " + pattern, errno);
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

fs::path make_unique_folder(const fs::path& prefix) {
  fs::path folder = make_unique(
      prefix.string(), [](const std::string& name) { return ::mkdir(name.c_str(), 0777); });
  if (folder.empty()) throw SystemError("cannot make folder " + prefix.string(), errno);
  return folder;
}

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string read_file(const fs::path& path, size_t most) {
  constexpr size_t kMostOfAStream = size_t{16} << 20;
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw SystemError("cannot open " + path.string(), errno);
  std::string content;
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw SystemError("cannot read " + path.string(), errno);
  const auto size = static_cast<size_t>(status.st_size);
  if (!S_ISREG(status.st_mode)) most = std::min(most, kMostOfAStream);
  if (size <= most) content.reserve(size + 1);
  char buffer[1 << 16];
  while (content.size() <= most) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n == 0) return content;
    if (n > 0) {
      content.append(buffer, static_cast<size_t>(n));
    } else if (errno != EINTR) {
      throw SystemError("cannot read " + path.string(), errno);
    }
  }
  throw DataError(path.string() + " has more than " + std::to_string(most) +
                  " bytes, the most that is read of it");
}

void write_all(int fd, const void* data, size_t size, const fs::path& name) {
  ignore_file_size_signal();
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = ::write(fd, next, size);
    if (n >= 0) {
      next += n;
      size -= static_cast<size_t>(n);
    } else if (errno != EINTR && !(errno == EINVAL && leave_direct_writes(fd))) {
      throw SystemError("cannot write " + name.string(), errno,
                        errno == ENOSPC ? "free some space there or choose another folder" : "");
    }
  }
}

void fsync_path(const fs::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw SystemError("cannot open " + path.string(), errno);
  if (::fsync(fd.get()) == 0 || errno == EINVAL || errno == ENOTSUP) return;
  throw SystemError("cannot flush " + path.string(), errno);
}

AtomicFile::AtomicFile(fs::path target) : target_(file_behind(std::move(target))) {
  aside_ = make_unique(name_beside(target_), [&](const std::string& name) {
    fd_.reset(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    return fd_.get();
  });
  if (!fd_) {
    throw SystemError("cannot write " + target_.string(), errno,
                      "check that the folder exists and that you may write there");
  }
}

AtomicFile::~AtomicFile() {
  if (!aside_.empty()) ::unlink(aside_.c_str());
}

void AtomicFile::write(const void* data, size_t size) {
  write_all(fd_.get(), data, size, target_);
}

void AtomicFile::commit() {
  if (::fsync(fd_.get()) != 0) throw SystemError("cannot flush " + target_.string(), errno);
  fd_.reset();
  if (::rename(aside_.c_str(), target_.c_str()) != 0) {
    throw SystemError("cannot rename " + aside_.string() + " to " + target_.string(), errno);
  }
  aside_.clear();
  flush_folder_of(target_);
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

}  // namespace lockstep
