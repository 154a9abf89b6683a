#include "lockstep/base/env.h"

#include <cstdlib>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {

std::optional<std::string> env_string(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (!value || !*value) return std::nullopt;
  return std::string(value);
}

std::optional<int64_t> env_int(const std::string& name, int64_t minimum, int64_t maximum) {
  const auto text = env_string(name);
  if (!text) return std::nullopt;
  const auto value = parse_int(*text);
  if (!value || *value < minimum || *value > maximum) {
    std::string range;
    if (minimum != INT64_MIN) range += " of at least " + std::to_string(minimum);
    if (maximum != INT64_MAX)
      range +=
          (range.empty() ? " of" : " and") + std::string(" at most ") + std::to_string(maximum);
    throw UsageError("environment variable " + name + "='" + *text + "': expected a whole number" +
                     range);
  }
  return value;
}

bool env_flag(const std::string& name) {
  const auto text = env_string(name);
  if (!text) return false;
  const std::string lower = to_lower(*text);
  if (lower == "1" || lower == "true" || lower == "yes" || lower == "on") return true;
  if (lower == "0" || lower == "false" || lower == "no" || lower == "off") return false;
  throw UsageError("environment variable " + name + "='" + *text +
                   "': expected 1, true, yes, on, 0, false, no or off");
}

}  // namespace lockstep
