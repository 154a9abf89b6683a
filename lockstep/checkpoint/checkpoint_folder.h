#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/stored_checkpoint.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/tensor_shard.h"

namespace lockstep {

class CheckpointLock;

/// The folder's checkpoints are another process's to write.
class FolderInUseError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// A folder of checkpoints, one per sub-folder: `step-00001234`. `latest` is a symbolic link to the
/// newest. Where it cannot be renewed it is removed, with a warning. A checkpoint is written aside
/// (`.tmp-*`), flushed and renamed. So a reader sees whole ones only, at any moment, also
/// after a crash or a loss of power.
///
/// One process writes at a time. The first call that writes takes the folder for this process. It
/// has it until the last copy of this object is gone or the process ends. Meanwhile the file
/// `.in-use` says which host and process that is, and what since. While another process has the
/// folder, such a call throws FolderInUseError after two seconds and touches nothing.
class CheckpointFolder {
 public:
  /// Does not touch the disk. `keep` newest checkpoints stay when one is written; 0: all.
  explicit CheckpointFolder(std::filesystem::path path, int64_t keep = 0,
                            CheckpointHash hash = CheckpointHash::xxh3);

  /// Makes the folder where it is missing, takes it for this process, removes what a killed writer
  /// left (`.tmp-*`). Throws CheckpointError naming a folder that cannot be written: training for
  /// hours and then failing to save loses them.
  void prepare();

  /// Sets checkpoints of later steps aside, as `superseded-step-*`, with a warning. When a run goes
  /// on from `step`, they belong to a course that it leaves. They must not be taken for its newest.
  /// Throws CheckpointError.
  void supersede_after(int64_t step);

  /// Writes, flushes and publishes one checkpoint, moves `latest`, and removes old ones. On failure
  /// (a full disk) nothing of it stays, older checkpoints stay, and CheckpointError says what
  /// happened. Returns its folder.
  std::filesystem::path write(const Checkpoint& checkpoint);
  /// The same of what `fill` writes into an empty folder. `fill` may throw, also CommErrors, which
  /// come out as they are.
  std::filesystem::path write(int64_t step,
                              const std::function<void(const std::filesystem::path&)>& fill);

  /// Folders of checkpoints, the newest (highest step) first. Empty when there is no folder.
  std::vector<std::filesystem::path> list() const;

  /// The newest checkpoint that is whole, as load_checkpoint finds it. None when the folder has no
  /// checkpoint.
  std::optional<std::pair<std::filesystem::path, Checkpoint>> read_newest() const;

  const std::filesystem::path& path() const { return path_; }
  CheckpointHash hash() const { return hash_; }  ///< Of what is written.

 private:
  void take();
  void point_latest_at(const std::filesystem::path& target);
  void remove_old();

  std::filesystem::path path_;
  int64_t keep_;
  CheckpointHash hash_;
  std::shared_ptr<CheckpointLock> lock_;
  bool told_of_links_ = false;
};

/// "step-00001234".
std::string checkpoint_name(int64_t step);

/// Every rank of the group calls, and writes what it alone has. What several ranks have alike is
/// shared out among them. Each rank needs access to `folder`, of which rank 0's object counts. When
/// one fails, every rank throws the CheckpointError that says so, also where the ranks' shards do
/// not make up a tensor. Returns when the checkpoint is on the disk.
///
/// Of a module and an optimizer that all ranks have whole:
///
///     save_checkpoint(group, folder, {.info = {.step = step},
///                                     .model = whole_shards(state_dict(*module)),
///                                     .state = whole_shards(optimizer->state(), "optimizer.")});
void save_checkpoint(const ProcessGroup& group, CheckpointFolder& folder,
                     const CheckpointShards& shards);

/// Whether all ranks see what rank 0 writes to the folder, as `save_checkpoint` needs it. Where
/// they do not, rank 0 must give all tensors whole, and the others none. A collective.
bool is_seen_by_all(const ProcessGroup& group, const std::filesystem::path& folder);

/// Each rank's tensors, as "rankR.NAME" on rank 0, which needs them where it alone writes. uint8
/// tensors on the CPU, as random states are. A collective.
StateDict gather_rank_state(const ProcessGroup& group, const StateDict& rank_state);

using AdaptIdentity =
    std::function<void(const CheckpointInfo& found, std::map<std::string, std::string>& identity)>;

/// Every rank of the group calls. Ranks share out the files, to compare their hashes. Of tensors
/// nothing is read yet: see `read_tensors`. `resume` is one of these:
/// - "none": returns none.
/// - "auto": the newest whole checkpoint of `folder`, or none when it has none.
/// - a path: a checkpoint's own folder, or a folder of checkpoints, of which the newest whole one
///   is taken.
///
/// Where some rank does not see the files, rank 0 reads all tensors and sends them. `device` is
/// where the group's backend communicates. Throws CheckpointError on all ranks: nothing at the
/// path, damaged, or of another `identity`.
///
/// Each damaged one on the way to the newest whole one is named in a warning. `adapt` may change
/// the identity by what rank 0 has found, before they are compared. The group may be null: then
/// there is one rank.
std::optional<StoredCheckpoint> load_checkpoint(const ProcessGroup& group,
                                                const std::string& resume,
                                                const CheckpointFolder* folder,
                                                const std::map<std::string, std::string>& identity,
                                                c10::Device device,
                                                const AdaptIdentity& adapt = {});

/// The same of a path by one process, of whatever identity.
StoredCheckpoint load_newest(const std::filesystem::path& path);

/// This rank's part of the state: the tensors whose names start with "rankR.", without that prefix.
/// A rank that the run that saved did not have gets that of another one.
StateDict state_of_rank(const StoredCheckpoint& checkpoint, int rank);

/// The tensors whose names start with `prefix`, without it.
StateDict with_prefix_removed(const StateDict& tensors, const std::string& prefix);

namespace detail {

/// The checkpoint of rank `source`, in every rank's memory. `device` is where the group's backend
/// communicates. A collective.
StoredCheckpoint shared(const ProcessGroup& group, StoredCheckpoint checkpoint, int source,
                        c10::Device device);

}  // namespace detail

}  // namespace lockstep
