#pragma once

#include <sys/resource.h>

#include <csignal>
#include <cstdint>
#include <optional>

namespace lockstep {

/// The bytes that `ulimit -f` allows a file, shared memory included. None: no limit.
inline std::optional<uint64_t> file_size_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::nullopt;
  return limit.rlim_cur;
}

/// From now on a write beyond that limit is the error EFBIG, as in Python, and does not end the
/// process, unless the program handles SIGXFSZ itself.
inline void ignore_file_size_signal() {
  struct sigaction action {};
  ::sigaction(SIGXFSZ, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL)
    std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace lockstep
