#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

/// A whole decimal number with nothing before or after it; none otherwise or when out of range.
std::optional<int64_t> parse_int(std::string_view text);

/// A decimal floating-point number with nothing before or after it; none otherwise.
std::optional<double> parse_double(std::string_view text);

/// "HOST:PORT" at its last colon, PORT from 1 to 65535; none otherwise.
std::optional<std::pair<std::string, uint16_t>> parse_endpoint(const std::string& text);
/// "HOST:PORT", with brackets around an IPv6 address in numbers.
std::string endpoint_text(const std::string& host, uint16_t port);

std::string to_lower(std::string_view text);
std::vector<std::string> split(std::string_view text, char separator);
std::string join(const std::vector<std::string>& parts, std::string_view separator);

/// "host/0", "host/1", ... for "host/": a key for each of `count` ranks.
std::vector<std::string> numbered_keys(const std::string& prefix, int count);

/// "rank 3", "ranks 1, 3".
std::string ranks_text(const std::vector<int>& ranks);

/// Random hexadecimal text of `bytes` bytes from the system, for names that nobody guesses.
std::string random_hex(size_t bytes);

/// "1.5 GB", "437 KB", "12 B": powers of 1000, at most one digit after the point.
std::string human_bytes(uint64_t bytes);

/// "2h05m", "3m07s", "12.3s", "450ms".
std::string human_seconds(double seconds);

/// "5 s", "1.5 s", "120 s": as a user would write a time-out.
std::string seconds_text(std::chrono::milliseconds time);

}  // namespace lockstep
