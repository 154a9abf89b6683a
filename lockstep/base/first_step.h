#pragma once

#include <atomic>

namespace lockstep {

/// Whether this process has trained a step, or reduced a tensor over ranks, as a loop of the user's
/// own does. A failure before that will come again in a process that starts anew, so the launcher
/// is told. Set by what trains, read by what reports failures: they share nothing but the process.
inline std::atomic<bool> made_first_step{false};

}  // namespace lockstep
