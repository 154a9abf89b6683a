#include "lockstep/checkpoint/checkpoint_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/descriptors.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process_identity.h"
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

/// False where another process has it. A file system without locks refuses nobody.
bool try_lock(int fd, const fs::path& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == ENOLCK || errno == ENOSYS || errno == EOPNOTSUPP) return true;
  if (errno == EWOULDBLOCK || errno == EINTR) return false;
  throw SystemError("cannot lock " + path.string(), errno);
}

/// What a lock's file says of the process that holds it.
struct LockOwner {
  std::string host;
  int64_t process = 0;
  std::string program;
  std::string since;     ///< "2026-11-22 10:23:38 UTC".
  std::string identity;  ///< See process_identity.
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LockOwner, host, process, program, since, identity)

/// This process, as an owner from now on.
LockOwner this_process() {
  return {host_name(), ::getpid(), program_invocation_short_name, utc_now(), process_identity()};
}

/// None for an empty file: its owner is about to write it, or died before it did.
std::optional<LockOwner> read_owner(int fd) {
  std::array<char, 4096> text{};
  const ssize_t size = ::pread(fd, text.data(), text.size(), 0);
  try {
    return json::parse(text.data(), text.data() + std::max<ssize_t>(size, 0)).get<LockOwner>();
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

void write_owner(int fd, const LockOwner& owner, const fs::path& path) {
  const std::string text = json(owner).dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  if (::ftruncate(fd, 0) != 0) throw SystemError("cannot write " + path.string(), errno);
  write_all(fd, text.data(), text.size(), path);
}

std::string described(const std::optional<LockOwner>& owner, const LockOwner& self) {
  if (!owner) return "another process writes";
  return "process " + std::to_string(owner->process) + " (" + owner->program + ") of " +
         (owner->host == self.host ? "this host" : "host " + owner->host) + " writes";
}

[[noreturn]] void refuse(const fs::path& folder, const std::optional<LockOwner>& owner,
                         const LockOwner& self) {
  throw FolderInUseError("folder " + folder.string() + " is in use: " + described(owner, self) +
                             " checkpoints there" + (owner ? " since " + owner->since : ""),
                         "wait until it has ended, or choose another folder with --checkpoint-dir");
}

void warn_of_other_host(const fs::path& folder, const LockOwner& owner) {
  log_warning("process " + std::to_string(owner.process) + " (" + owner.program + ") of host " +
              owner.host + " has had folder " + folder.string() + " since " + owner.since +
              " and did not end normally. If it still runs, end it: the locks of this file system "
              "may not reach other hosts, and two runs would write here");
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

std::unique_ptr<CheckpointLock> CheckpointLock::acquire(const fs::path& folder,
                                                        std::chrono::milliseconds patience) {
  std::unique_ptr<CheckpointLock> lock(new CheckpointLock(folder / kFile));
  const LockOwner self = this_process();
  const auto deadline = Clock::now() + patience;
  while (true) {
    if (!open_file(lock->fd_, lock->path_)) continue;
    if (try_lock(lock->fd_.get(), lock->path_)) {
      if (!lock->is_in_place()) continue;
      const auto before = read_owner(lock->fd_.get());
      if (before && before->host != self.host) warn_of_other_host(folder, *before);
      lock->process_ = self.process;
      write_owner(lock->fd_.get(), self, lock->path_);
      return lock;
    }
    const auto owner = read_owner(lock->fd_.get());
    if (owner && owner->identity == self.identity) return nullptr;
    if (Clock::now() >= deadline) refuse(folder, owner, self);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

CheckpointLock::~CheckpointLock() {
  if (::getpid() == process_ && is_in_place()) ::unlink(path_.c_str());
}

bool CheckpointLock::is_in_place() const {
  return is_still_named(fd_.get(), path_);
}

}  // namespace lockstep
