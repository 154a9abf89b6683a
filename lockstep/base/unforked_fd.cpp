#include "lockstep/base/unforked_fd.h"

#include <fcntl.h>
#include <pthread.h>

#include <mutex>
#include <set>
#include <utility>

namespace lockstep {

/// All of this process. A fork waits until nobody changes them, and the child closes them.
struct OpenInThisProcess {
  std::mutex mutex;
  std::set<UnforkedFd*> all;

  static OpenInThisProcess& get() {
    static OpenInThisProcess& only = *watched(new OpenInThisProcess);  // Forks go on until the end.
    return only;
  }

 private:
  static OpenInThisProcess* watched(OpenInThisProcess* made) {
    pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                   [] {
                     for (UnforkedFd* one : get().all) one->fd_.reset();
                     get().all.clear();
                     get().mutex.unlock();
                   });
    return made;
  }
};

UnforkedFd::~UnforkedFd() {
  reset();
}

void UnforkedFd::reset() {
  if (!fd_) return;
  auto& open = OpenInThisProcess::get();
  const std::lock_guard lock(open.mutex);
  open.all.erase(this);
  fd_.reset();
}

bool UnforkedFd::open(const char* path, int flags) {
  auto& open = OpenInThisProcess::get();
  const std::lock_guard lock(open.mutex);
  open.all.erase(this);
  fd_.reset(::open(path, flags | O_CLOEXEC));
  if (!fd_) return false;
  open.all.insert(this);
  return true;
}

void UnforkedFd::take(UniqueFd fd) {
  auto& open = OpenInThisProcess::get();
  const std::lock_guard lock(open.mutex);
  open.all.erase(this);
  fd_ = std::move(fd);
  if (fd_) open.all.insert(this);
}

}  // namespace lockstep
