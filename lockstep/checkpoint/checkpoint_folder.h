#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

class CheckpointLock;

/// The folder's checkpoints are another process's to write.
class FolderInUseError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// A folder of checkpoints, one per sub-folder: `step-00001234`. `latest` is a symbolic link to the
/// newest, which a file system without such links lacks, with a warning. A checkpoint is written
/// aside (`.tmp-*`), flushed and renamed. So a reader sees whole ones only, at any moment, also
/// after a crash or a loss of power.
///
/// One process writes at a time. The first call that writes takes the folder for this process. It
/// has it until the last copy of this object is gone or the process ends. Meanwhile the file
/// `.in-use` says which host and process that is, and what since. While another process has the
/// folder, such a call throws FolderInUseError after two seconds and touches nothing.
class CheckpointFolder {
 public:
  /// Does not touch the disk. `keep` newest checkpoints stay when one is written; 0: all.
  explicit CheckpointFolder(std::filesystem::path path, int64_t keep = 0);

  /// Makes the folder where it is missing, takes it for this process, removes what a killed writer
  /// left (`.tmp-*`), and writes and removes a file to see that it can. Throws CheckpointError
  /// naming the folder: training for hours and then failing to save loses them.
  void prepare();

  /// Sets checkpoints of later steps aside, as `superseded-step-*`, with a warning. When a run goes
  /// on from `step`, they belong to a course that it leaves. They must not be taken for its newest.
  /// Throws CheckpointError.
  void supersede_after(int64_t step);

  /// Writes, flushes and publishes one checkpoint, moves `latest`, and removes old ones. On failure
  /// (a full disk) nothing of it stays, older checkpoints stay, and CheckpointError says what
  /// happened. Returns its folder.
  std::filesystem::path write(const Checkpoint& checkpoint);

  /// Folders of checkpoints, the newest (highest step) first. Empty when there is no folder.
  std::vector<std::filesystem::path> list() const;

  /// The newest checkpoint that is whole. Each damaged one on the way is named in a warning. None
  /// when the folder has no checkpoint. Throws DamagedCheckpointError when all are damaged.
  std::optional<std::pair<std::filesystem::path, Checkpoint>> read_newest() const;

  const std::filesystem::path& path() const { return path_; }

 private:
  void take();
  bool make_link(const std::filesystem::path& target, const std::filesystem::path& link);
  void point_latest_at(const std::filesystem::path& target);
  void remove_old();

  std::filesystem::path path_;
  int64_t keep_;
  std::shared_ptr<CheckpointLock> lock_;
  bool told_of_links_ = false;
};

/// "step-00001234".
std::string checkpoint_name(int64_t step);

/// Every rank of the group calls. Rank 0's `checkpoint` is written to `folder`, together with every
/// rank's `rank_state`: uint8 tensors on the CPU, as random states are. That lands in the state as
/// "rank3.NAME". Only rank 0 touches the disk. When it fails, every rank throws the CheckpointError
/// that says so. Returns when the checkpoint is on the disk.
void save_checkpoint(const ProcessGroup& group, CheckpointFolder& folder,
                     const Checkpoint& checkpoint, const StateDict& rank_state);

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
StateDict state_of_rank(const Checkpoint& checkpoint, int rank);

/// The tensors whose names start with `prefix`, without it.
StateDict with_prefix_removed(const StateDict& tensors, const std::string& prefix);

}  // namespace lockstep
