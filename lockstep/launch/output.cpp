#include "lockstep/launch/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace lockstep::launch {

void OutputQueue::write(std::string_view bytes, const void* writer) {
  last_writer_ = writer;
  if (failed_with_ == 0) queue_.append(bytes);
}

void OutputQueue::pump() {
  while (pending()) {
    pollfd ready{fd_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) <= 0) break;
    // A pipe that is ready takes this much without blocking.
    const size_t size = std::min<size_t>(queue_.size() - begin_, PIPE_BUF);
    const ssize_t written = ::write(fd_, queue_.data() + begin_, size);
    if (written < 0) {
      if (errno == EINTR || errno == EAGAIN) break;
      failed_with_ = errno;
      queue_.clear();
      begin_ = 0;
      return;
    }
    begin_ += static_cast<size_t>(written);
  }
  if (begin_ == queue_.size() || begin_ > kFull) {
    queue_.erase(0, begin_);
    begin_ = 0;
  }
}

bool same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

bool input_is_ours() {
  return !isatty(STDIN_FILENO) || tcgetpgrp(STDIN_FILENO) == getpgrp();
}

void ensure_standard_descriptors() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) ::close(fd);
}

}  // namespace lockstep::launch
