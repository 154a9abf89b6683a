#include "lockstep/checkpoint/checkpoint_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/process_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/checkpoint_folder.h"

namespace lockstep {
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using nlohmann::json;
namespace {

constexpr char kFile[] = ".in-use";

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

/// The kernel's boot and process namespace: see process_identity.
std::string boot_of(const std::string& identity) {
  return identity.substr(0, identity.find(','));
}

bool has_option(const std::string& options, const std::string& wanted) {
  const auto all = split(options, ',');
  return std::find(all.begin(), all.end(), wanted) != all.end();
}

LockReach reach_of_locks_at(const fs::path& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) return LockReach::all_hosts;
  const std::string device =
      std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
  std::ifstream mounts("/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const auto words = split(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 3 || words[2] != device || words.end() - dash < 4) continue;
    return locks_reach_all_hosts(dash[1], dash[3]) ? LockReach::all_hosts : LockReach::this_host;
  }
  return LockReach::all_hosts;  // only local file systems hide behind another device
}

enum class Attempt { granted, refused, no_locks };

Attempt try_lock(int fd, const fs::path& path) {
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    switch (errno) {
      case EINTR:
        continue;
      case EWOULDBLOCK:
        return Attempt::refused;
      case ENOLCK:
      case ENOSYS:
      case EOPNOTSUPP:
        return Attempt::no_locks;
      default:
        throw SystemError("cannot lock " + path.string(), errno);
    }
  }
  return Attempt::granted;
}

/// True when the open file still is the one under that name: an owner that is done removes it.
bool is_current(int fd, const fs::path& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/// None for an empty file: its owner is about to write it, or died before it did.
std::optional<LockOwner> read_owner(int fd) {
  std::array<char, 4096> text{};
  const ssize_t size = ::pread(fd, text.data(), text.size(), 0);
  const std::string content(text.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
  const json object = json::parse(content, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return std::nullopt;
  LockOwner owner;
  try {
    owner.host = object.at("host");
    owner.process = object.at("process");
    owner.program = object.at("program");
    owner.since = object.at("since");
    owner.identity = object.at("identity");
  } catch (const json::exception&) {
    return std::nullopt;
  }
  return owner;
}

void write_owner(int fd, const LockOwner& owner, const fs::path& path) {
  const json object = {{"host", owner.host},
                       {"process", owner.process},
                       {"program", owner.program},
                       {"since", owner.since},
                       {"identity", owner.identity}};
  const std::string text = object.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  if (::ftruncate(fd, 0) != 0) throw SystemError("cannot write " + path.string(), errno);
  write_all(fd, text.data(), text.size(), path);
}

std::string described(const std::optional<LockOwner>& owner, const LockOwner& self) {
  if (!owner) return "another process writes";
  return "process " + std::to_string(owner->process) + " (" + owner->program + ") of " +
         (owner->host == self.host ? "this host" : "host " + owner->host) + " writes";
}

[[noreturn]] void refuse(const fs::path& folder, Attempt attempt,
                         const std::optional<LockOwner>& owner, const LockOwner& self) {
  const std::string file = (folder / kFile).string();
  std::string hint = "wait until it has ended, or choose another folder with --checkpoint-dir";
  if (attempt != Attempt::refused && owner && owner->host != self.host) {
    hint =
        "locks of this file system do not reach other hosts. If that process has ended, remove " +
        file;
  } else if (owner && process_state(owner->identity) == ProcessState::ended) {
    hint = "it has ended, but a process that it started still holds " + file + " (fuser names it)";
  }
  throw FolderInUseError("folder " + folder.string() + " is in use: " + described(owner, self) +
                             " checkpoints there" + (owner ? " since " + owner->since : ""),
                         hint);
}

/// False when another owner removed it at this moment.
bool open_file(UnforkedFd& fd, const fs::path& path) {
  constexpr int kFlags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
  if (const UniqueFd made(::open(path.c_str(), kFlags | O_CREAT, 0666)); made) {
    if (fd.open(path.c_str(), kFlags)) return true;
  }
  const int reason = errno;  // What is asked from here on sets errno too.
  if (reason == ENOENT && fs::exists(path.parent_path())) return false;
  throw SystemError("cannot open " + path.string(), reason,
                    fs::exists(path) ? "if no process of its owner writes there, remove it" : "");
}

}  // namespace

LockOwner this_process() {
  return {host_name(), ::getpid(), program_invocation_short_name, utc_now(), process_identity()};
}

bool locks_reach_all_hosts(const std::string& type, const std::string& options) {
  if (type.starts_with("nfs")) return has_option(options, "local_lock=none");
  if (type == "lustre") return has_option(options, "flock");
  static const std::vector<std::string> kOneHostOnly{"9p",     "afs",       "beegfs",   "cifs",
                                                     "smb3",   "glusterfs", "orangefs", "pvfs2",
                                                     "vboxsf", "virtiofs"};
  return !type.starts_with("fuse") &&
         std::find(kOneHostOnly.begin(), kOneHostOnly.end(), type) == kOneHostOnly.end();
}

bool may_be_at_work(const LockOwner& owner, const LockOwner& self, LockReach reach) {
  const bool same_kernel = boot_of(owner.identity) == boot_of(self.identity);
  if (reach == LockReach::all_hosts || (reach == LockReach::this_host && same_kernel)) return false;
  if (same_kernel) return process_state(owner.identity) != ProcessState::ended;
  return owner.host != self.host;  // the same host was started anew since
}

std::unique_ptr<CheckpointLock> CheckpointLock::acquire(const fs::path& folder,
                                                        std::chrono::milliseconds patience,
                                                        std::optional<LockReach> reach) {
  std::unique_ptr<CheckpointLock> lock(new CheckpointLock(folder / kFile));
  const LockOwner self = this_process();
  const auto deadline = Clock::now() + patience;
  if (!reach) reach = reach_of_locks_at(folder);
  while (true) {
    if (!open_file(lock->fd_, lock->path_)) continue;
    const Attempt attempt = try_lock(lock->fd_.get(), lock->path_);
    if (attempt == Attempt::granted && !lock->is_in_place()) continue;
    const auto owner = read_owner(lock->fd_.get());
    const LockReach granted = attempt == Attempt::granted ? *reach : LockReach::none;
    const bool taken =
        attempt == Attempt::refused || (owner && may_be_at_work(*owner, self, granted));
    if (taken && owner && owner->identity == self.identity) return nullptr;
    if (!taken) {
      lock->process_ = self.process;
      write_owner(lock->fd_.get(), self, lock->path_);
      return lock;
    }
    if (Clock::now() >= deadline) refuse(folder, attempt, owner, self);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

CheckpointLock::~CheckpointLock() {
  if (::getpid() == process_ && is_in_place()) ::unlink(path_.c_str());
}

bool CheckpointLock::is_in_place() const {
  return is_current(fd_.get(), path_);
}

}  // namespace lockstep
