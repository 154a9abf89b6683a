#pragma once

#include <string_view>

namespace lockstep {

/// Whether it is a terminal that can move its cursor.
bool is_live_terminal(int fd);

/// What a whole line on a live terminal begins with: it erases a progress bar that stands there,
/// whose end would show behind a shorter line. Empty for any other descriptor.
std::string_view line_start(int fd);

}  // namespace lockstep
