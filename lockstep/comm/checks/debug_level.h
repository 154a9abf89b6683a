#pragma once

namespace lockstep {

/// How much a group checks that its ranks agree: `off`, `info` (the first collectives of a group),
/// `detail` (every one).
enum class DebugLevel { off, info, detail };

}  // namespace lockstep
