#include "lockstep/data/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

/// True when the open file still is the one under that name: an owner that is done removes it.
bool is_current(int fd, const fs::path& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw SystemError("cannot make the folder " + folder.string(), error.value());
}

}  // namespace

std::unique_ptr<FolderLock> FolderLock::try_acquire(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd) {
    throw SystemError("cannot make " + path.string(), errno,
                      "the folder must be writable to download into it");
  }
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK || errno == EINTR) return nullptr;
    throw SystemError("cannot lock " + path.string(), errno);
  }
  if (!is_current(fd.get(), path)) return nullptr;
  return std::unique_ptr<FolderLock>(new FolderLock(std::move(fd), path));
}

std::unique_ptr<FolderLock> FolderLock::acquire(const fs::path& folder,
                                                const std::function<bool()>& filled,
                                                const Options& options) {
  const fs::path path = folder / ".lockstep.lock";
  const auto start = Clock::now();
  auto patience_ends = start + options.patience;
  while (!filled()) {
    const bool patient = Clock::now() < patience_ends;
    if (!patient) make_folder(folder);  // Who fails to fill it may have removed it.
    std::error_code ignored;
    const bool is_there = fs::exists(folder, ignored);
    auto lock = is_there ? try_acquire(path) : nullptr;
    if (lock && !patient) return lock;
    const bool at_work = is_there && !lock;
    if (at_work) patience_ends = Clock::now() + options.patience;
    lock.reset();
    if (Clock::now() - start >= options.timeout) {
      throw TimeoutError("waited " +
                             human_seconds(std::chrono::duration<double>(options.timeout).count()) +
                             " for another process to fill " + folder.string(),
                         "find the process that holds " + path.string() + " (fuser names it)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return nullptr;
}

FolderLock::~FolderLock() {
  if (fd_) ::unlink(path_.c_str());  // It is not a forked child's.
}

void fill_folder(const fs::path& folder, const std::function<bool()>& filled,
                 const std::function<void()>& fill, std::chrono::milliseconds timeout) {
  std::error_code ignored;
  std::vector<fs::path> missing;  // The innermost first.
  for (auto path = folder; !path.empty() && !fs::exists(path, ignored); path = path.parent_path())
    missing.push_back(path);
  const bool first = env_int("LOCAL_RANK", 0).value_or(0) == 0;
  const std::chrono::seconds patience(first ? 0 : 10);
  try {
    if (const auto lock = FolderLock::acquire(folder, filled, {timeout, patience})) fill();
  } catch (...) {
    for (const fs::path& path : missing) fs::remove(path, ignored);  // Unless something is in it.
    throw;
  }
}

}  // namespace lockstep
