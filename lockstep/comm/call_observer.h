#pragma once

#include <memory>

#include "lockstep/comm/checks/observed_call.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

/// From here on `observer` is told of every collective that goes through the group on this rank,
/// those of DistributedDataParallel too; null ends it. Sends and receives are not told of, nor is
/// monitored_barrier. What it costs: two readings of the clock and a callback a collective; without
/// an observer, the look at a pointer. For NCCL the times are those of the host, not the device's.
/// To be called while no collective of this rank is under way. Throws CommError when the group is
/// closed.
void observe_calls(const ProcessGroup& group, std::shared_ptr<CallObserver> observer);

}  // namespace lockstep
