#pragma once

#include <chrono>

namespace lockstep {

/// `timeout`, and a shell at a terminal, send their signal to a process and again to its group. So
/// whoever treats a second signal as a demand to end at once passes by what comes this soon after
/// the first.
inline constexpr std::chrono::milliseconds kSameSignal{300};

}  // namespace lockstep
