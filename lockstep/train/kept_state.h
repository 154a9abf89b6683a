#pragma once

#include <memory>

#include "lockstep/checkpoint/stored_checkpoint.h"
#include "lockstep/comm/world.h"

namespace lockstep::detail {

/// Names of CheckpointInfo::values: sums of the epoch's metrics, those since the last log, and its
/// step. The last two are in no checkpoint on a disk.
inline constexpr const char* kEpochSums = "epoch.";
inline constexpr const char* kLogSums = "log.";
inline constexpr const char* kLoggedStep = "log.step";

/// Gives all ranks the state after a finished step of a rank that is furthest. `own` is this
/// rank's; null where it has none. What living ranks have measured since the last log and in the
/// epoch goes to rank 0. Null where no rank has a state. Collective.
std::shared_ptr<const StoredCheckpoint> share_kept_state(
    const std::shared_ptr<const StoredCheckpoint>& own, const World& world);

}  // namespace lockstep::detail
