#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Every rank of the group calls. Rank 0's `checkpoint` is written to `folder`, together with every
/// rank's `rank_state`: uint8 tensors on the CPU, as random states are. That lands in the state as
/// "rank3.NAME". Only rank 0 touches the disk. When it fails, every rank throws the CheckpointError
/// that says so. Returns when the checkpoint is on the disk.
void save_checkpoint(const ProcessGroup& group, CheckpointFolder& folder,
                     const Checkpoint& checkpoint, const NamedTensors& rank_state);

/// Every rank of the group calls. Rank 0 reads and sends to the others, which need no access to the
/// files. `resume` is one of these:
/// - "none": returns none.
/// - "auto": the newest whole checkpoint of `folder`, or none when it has none.
/// - a path: a checkpoint's own folder, or a folder of checkpoints, of which the newest whole one
///   is taken.
///
/// The tensors are on the CPU. `device` is where the group's backend communicates. Throws
/// CheckpointError on all ranks: nothing at the path, damaged, or of another `identity`.
std::optional<Checkpoint> load_checkpoint(const ProcessGroup& group, const std::string& resume,
                                          const CheckpointFolder* folder,
                                          const std::map<std::string, std::string>& identity,
                                          c10::Device device);

/// This rank's part of the state: the tensors whose names start with "rankR.", without that prefix.
NamedTensors state_of_rank(const Checkpoint& checkpoint, int rank);

/// The tensors whose names start with `prefix`, without it.
NamedTensors with_prefix_removed(const NamedTensors& tensors, const std::string& prefix);

}  // namespace lockstep
