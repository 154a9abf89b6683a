#include "lockstep/base/settings.h"

#include <algorithm>

#include "lockstep/base/duration.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

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

void check_settings() {
  timeout_setting();
  debug_setting();
  log_level_setting();
}

}  // namespace lockstep
