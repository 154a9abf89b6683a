#pragma once

#include <optional>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {

/// Where rank 0 keeps the checkpoints of `--snapshot-every`: in its host's memory (/dev/shm), apart
/// for each user and --checkpoint-dir. They outlive the job's processes. Without a --checkpoint-dir
/// it is a folder of the launcher's, if ranks live on, for as long as they do. None without the
/// flag.
std::optional<CheckpointFolder> snapshot_folder(const RunConfig& config);

/// Makes that folder, and empties it where the run does not go on from what is there: of --resume
/// auto what is newer than the checkpoints on the disk. Throws UsageError.
void prepare_snapshots(const RunConfig& config);

/// Whether the newest checkpoint of `a` is of a later step than all of `b`.
bool is_newer(const CheckpointFolder& a, const CheckpointFolder& b);

/// Frees the memory of snapshots, unless they are newer than the checkpoints on the disk.
void remove_old_snapshots(const RunConfig& config);

/// When no process of the job is left: writes a snapshot that is newer than the checkpoints to the
/// disk, and frees its memory. Where that fails a warning says so, and it stays.
void write_snapshot_to_disk(const RunConfig& config);

}  // namespace lockstep
