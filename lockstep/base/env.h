#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// The value of an environment variable; none when it is unset or empty.
std::optional<std::string> env_string(const std::string& name);

/// The value of an environment variable that holds a whole number.
/// Throws UsageError naming the variable and its value when it is no whole number in
/// [minimum, maximum].
std::optional<int64_t> env_int(const std::string& name, int64_t minimum = INT64_MIN,
                               int64_t maximum = INT64_MAX);

/// True for 1, true, yes, on; false for 0, false, no, off, unset (any case).
/// Throws UsageError for anything else.
bool env_flag(const std::string& name);

}  // namespace lockstep
