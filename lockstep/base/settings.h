#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// What LOCKSTEP_* variables say to every rank of a job. None when unset or empty. Each throws
// UsageError naming its variable, the value and what was expected.

/// LOCKSTEP_TIMEOUT, in seconds.
std::optional<std::chrono::milliseconds> timeout_setting();
/// LOCKSTEP_DEBUG in lower case: off, info or detail.
std::optional<std::string> debug_setting();
/// LOCKSTEP_LOG_LEVEL: debug, info, warning, error or quiet.
std::optional<std::string> log_level_setting();

/// Reads them all. Who starts several ranks calls it first, so that a mistake is said once and not
/// by every rank.
void check_settings();

}  // namespace lockstep
