#include "lockstep/base/temporary_folder.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "lockstep/base/env.h"
#include "lockstep/base/log.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

/// Why nothing can be written there; empty: it can.
std::string refusal_of(const fs::path& folder) {
  std::error_code error;
  const bool is_folder = fs::is_directory(folder, error);
  if (!is_folder) return error ? error.message() : "it is no folder";
  return ::access(folder.c_str(), W_OK | X_OK) == 0 ? "" : std::strerror(errno);
}

}  // namespace

fs::path temporary_folder() {
  constexpr const char* kFallback = "/tmp";
  const auto chosen = env_string("TMPDIR");
  if (!chosen) return kFallback;
  const std::string refusal = refusal_of(*chosen);
  if (refusal.empty()) return *chosen;
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    log_warning("environment variable TMPDIR='" + *chosen + "': " + refusal +
                "; temporary files go to /tmp");
  }
  return kFallback;
}

}  // namespace lockstep
