#include "lockstep/base/settings.h"

#include <algorithm>

#include "lockstep/base/duration.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

constexpr const char* kHostsBackend = "LOCKSTEP_HOSTS_BACKEND";

std::optional<std::string> one_of(const std::string& name, const char* kind,
                                  const std::vector<std::string>& known) {
  const auto text = env_string(name);
  if (!text) return std::nullopt;
  const std::string word = to_lower(*text);
  if (std::find(known.begin(), known.end(), word) != known.end()) return word;
  throw UsageError("environment variable " + name + ": " + unknown_word(kind, *text, known),
                   "it takes " + join(known, ", "));
}

}  // namespace

std::optional<std::chrono::milliseconds> timeout_setting() {
  const auto text = env_string("LOCKSTEP_TIMEOUT");
  if (!text) return std::nullopt;
  const auto seconds = parse_double(*text);
  if (const auto timeout = seconds ? timeout_of_seconds(*seconds) : std::nullopt) return timeout;
  throw UsageError("environment variable LOCKSTEP_TIMEOUT='" + *text + "': expected a number " +
                   timeout_bounds());
}

std::optional<std::string> debug_setting() {
  return one_of("LOCKSTEP_DEBUG", "level", {"off", "info", "detail"});
}

std::optional<std::string> log_level_setting() {
  return one_of("LOCKSTEP_LOG_LEVEL", "level", {"debug", "info", "warning", "error", "quiet"});
}

std::optional<std::string> hosts_backend_setting() {
  const auto text = env_string(kHostsBackend);
  if (text && (*text == "hierarchical" || *text == "shm" || *text == "nccl")) {
    throw UsageError("environment variable " + std::string(kHostsBackend) + "='" + *text +
                         "': it does not join CPU tensors between hosts",
                     "leave it unset for gloo; for CUDA tensors use --backend nccl, which knows "
                     "hosts by itself");
  }
  return one_of(kHostsBackend, "backend", {"gloo", "mpi"});
}

void check_settings() {
  timeout_setting();
  debug_setting();
  log_level_setting();
  hosts_backend_setting();
}

}  // namespace lockstep
