#include "lockstep/base/unforked_fd.h"

#include <fcntl.h>
#include <pthread.h>

#include <mutex>
#include <set>
#include <utility>

namespace lockstep {
namespace {

/// Those of this process. A fork waits while the mutex is held. In the child no other thread runs.
struct OpenFds {
  std::mutex mutex;  ///< Guards the rest.
  std::set<UniqueFd*> all;

  void put(UniqueFd& owner, UniqueFd fd) {
    all.erase(&owner);
    owner = std::move(fd);
    if (owner) all.insert(&owner);
  }
};

OpenFds& open_fds() {
  static OpenFds& only = *[] {
    pthread_atfork([] { open_fds().mutex.lock(); }, [] { open_fds().mutex.unlock(); },
                   [] {
                     for (UniqueFd* one : std::exchange(open_fds().all, {})) one->reset();
                     open_fds().mutex.unlock();
                   });
    return new OpenFds;  // Forks go on until the end.
  }();
  return only;
}

}  // namespace

UnforkedFd::~UnforkedFd() {
  reset();
}

void UnforkedFd::reset() {
  if (fd_) take({});
}

bool UnforkedFd::open(const char* path, int flags) {
  const std::lock_guard lock(open_fds().mutex);
  open_fds().put(fd_, UniqueFd(::open(path, flags | O_CLOEXEC)));
  return static_cast<bool>(fd_);
}

void UnforkedFd::take(UniqueFd fd) {
  const std::lock_guard lock(open_fds().mutex);
  open_fds().put(fd_, std::move(fd));
}

}  // namespace lockstep
