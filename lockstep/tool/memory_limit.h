#pragma once

#include <string>

namespace lockstep::tool {

/// Whether RLIMIT_AS (`ulimit -v`) limits this process.
bool memory_is_limited();

/// "\n  hint: a memory limit holds: ..." where it does, else empty.
std::string memory_limit_hint();

/// As long as it lives, an abort() ends the process with a message and exit code 1 in place of
/// SIGABRT, if a memory limit holds; else nothing changes. For code of others that cannot bear a
/// failed allocation: LibTorch's initialisers run in noexcept functions. One at a time per process.
class AbortMeansMemory {
 public:
  /// `message`: "lockstep train: error: ..." without a newline; the hint is added.
  explicit AbortMeansMemory(const std::string& message);
  ~AbortMeansMemory();
  AbortMeansMemory(const AbortMeansMemory&) = delete;
  AbortMeansMemory& operator=(const AbortMeansMemory&) = delete;
};

}  // namespace lockstep::tool
