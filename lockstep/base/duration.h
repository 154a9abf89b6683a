#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace lockstep {

/// The longest time-out that is taken, some 11 days: what waits takes milliseconds as an int, and
/// clocks count nanoseconds.
inline constexpr std::chrono::seconds kLongestTimeout{1'000'000};

/// "from 0.001 to 1000000 seconds": what `timeout_of_seconds` takes, for messages.
std::string timeout_bounds();

/// Seconds as a user gives them. None when they are not within `timeout_bounds`, or no number.
std::optional<std::chrono::milliseconds> timeout_of_seconds(double seconds);

/// Throws UsageError, which begins with `what`, unless the time-out is within `timeout_bounds`.
void check_timeout(const std::string& what, std::chrono::milliseconds timeout);

}  // namespace lockstep
