#pragma once

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

}  // namespace lockstep
