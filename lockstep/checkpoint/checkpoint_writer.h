#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

/// What a save does while training goes on.
enum class CheckpointOverlap {
  none,  ///< It returns when the checkpoint is on the disk.
  wait,  ///< It is written behind training. The next save waits until it is.
  skip,  ///< The same, but a save is left out while the one before is being written.
};
/// "none", "wait", "skip". Throws UsageError.
CheckpointOverlap checkpoint_overlap(const std::string& name);

/// Saves checkpoints of a group's ranks behind their training. A save costs them one copy of what
/// each writes, into memory that the next save uses again (page-locked for tensors on a GPU). A
/// thread writes it, and publishes the checkpoint when all ranks have written. It talks to the
/// other ranks' threads over a group of their own. Every rank has one and makes the same calls.
class CheckpointWriter {
 public:
  CheckpointWriter(ProcessGroup group, CheckpointFolder folder);
  /// Finishes what is being written, and does not throw.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// False where it was left out. See `save_checkpoint` for what the shards are. With `none` it
  /// throws CheckpointError where the checkpoint could not be written. Else rank 0 says so in a
  /// warning, and training goes on.
  bool save(const CheckpointShards& shards, CheckpointOverlap overlap = CheckpointOverlap::wait);

  /// Waits for what is being written. Throws CheckpointError, on all ranks, where the newest
  /// checkpoint could not be written, once.
  void finish();

 private:
  bool is_busy_anywhere();
  void copy(const std::vector<at::Tensor*>& tensors);

  struct Pending;
  ProcessGroup group_;
  ProcessGroup own_group_;  ///< Of the threads.
  CheckpointFolder folder_;
  at::Tensor buffer_;
  std::unique_ptr<Pending> pending_;
};

}  // namespace lockstep
