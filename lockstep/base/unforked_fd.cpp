#include "lockstep/base/unforked_fd.h"

#include <fcntl.h>

#include <utility>

#include "lockstep/base/known_to_forks.h"

namespace lockstep {

using Open = KnownToForks<UnforkedFd>;

UnforkedFd::~UnforkedFd() {
  reset();
}

void UnforkedFd::reset() {
  if (!fd_) return;
  auto& open = Open::get();
  const std::lock_guard lock(open.mutex);
  open.all.erase(this);
  fd_.reset();
}

bool UnforkedFd::open(const char* path, int flags) {
  auto& open = Open::get();
  const std::lock_guard lock(open.mutex);
  open.all.erase(this);
  fd_.reset(::open(path, flags | O_CLOEXEC));
  if (!fd_) return false;
  open.all.insert(this);
  return true;
}

void UnforkedFd::take(UniqueFd fd) {
  auto& open = Open::get();
  const std::lock_guard lock(open.mutex);
  open.all.erase(this);
  fd_ = std::move(fd);
  if (fd_) open.all.insert(this);
}

}  // namespace lockstep
