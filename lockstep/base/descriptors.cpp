#include "lockstep/base/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <memory>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

/// Without /proc: what a process has from its start.
constexpr int64_t kStandard = 3;

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

}  // namespace

bool is_still_named(int fd, const std::filesystem::path& name) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(fd, &opened) == 0 && ::stat(name.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

int64_t open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  // Where even the folder cannot be opened, all that are allowed are in use.
  rlimit limit{};
  if (!folder && errno == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    return static_cast<int64_t>(limit.rlim_cur);
  }
  if (!folder) return kStandard;
  int64_t entries = 0;
  while (::readdir(folder.get())) ++entries;
  return entries - 3;  // ".", "..", and the folder's own
}

void make_room_for_descriptors(int64_t more, const std::string& what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const auto needed = static_cast<rlim_t>(open_descriptors() + more);
  if (needed <= limit.rlim_cur) return;
  rlimit raised = limit;
  raised.rlim_cur = needed;
  if (needed <= limit.rlim_max && ::setrlimit(RLIMIT_NOFILE, &raised) == 0) return;
  throw Error(what + ": " + std::to_string(needed) +
                  " open files and sockets are needed in one process, but `ulimit -n` allows " +
                  limit_text(limit.rlim_cur) + " (hard limit " + limit_text(limit.rlim_max) + ")",
              "raise the limit, for example by `ulimit -n " + std::to_string(needed) +
                  "`, by nofile in /etc/security/limits.conf or by LimitNOFILE of a service, or "
                  "start fewer ranks");
}

}  // namespace lockstep
