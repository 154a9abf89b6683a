#pragma once

#include <chrono>
#include <memory>

#include "lockstep/comm/checks/observed_call.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

/// From here on `observer` is told of every collective that goes through the group on this rank,
/// those of DistributedDataParallel too. Null ends it. Sends, receives and monitored_barrier are
/// not told of. It costs two readings of the clock and a callback per collective. Without an
/// observer it costs the check of a pointer. For NCCL the times are the host's, not the device's.
///
/// Call it while no collective of this rank is under way. Throws CommError when the group is
/// closed.
void observe_calls(const ProcessGroup& group, std::shared_ptr<CallObserver> observer);

/// How long this thread has been held up by calls of process groups and by waits for them. A call
/// counts that had ended when it came back. None counts where the flight recorder is off, and waits
/// for futures of LibTorch's reducer do not.
std::chrono::nanoseconds time_held_up();

}  // namespace lockstep
