#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/base/hash.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/stored_checkpoint.h"

namespace lockstep::detail {

/// Of a null group, too.
inline bool is_alone(const ProcessGroup& group) {
  return !group || group.size() == 1;
}

/// A shard of a checkpoint, and who writes it where.
struct PlannedShard {
  TensorShard shard;  ///< With its values where this rank writes it.
  bool of_model = false;
  std::vector<int> holders = {};  ///< Ranks that have it.
  int writer = 0;
  std::string file = {};
};

Hasher::Algorithm algorithm_of(CheckpointHash kind);

/// One checkpoint that all ranks of a group write together.
class ShardedSave {
 public:
  /// Agrees on who writes what. A collective. What several ranks have is written by one of them, so
  /// that all write about as many bytes. The group may be null: then there is one rank. Throws
  /// CheckpointError on all ranks where they disagree, or have not all of a tensor.
  ShardedSave(const ProcessGroup& group, const CheckpointShards& shards);

  /// What this rank is to write. To be replaced by copies where the tensors change meanwhile.
  std::vector<at::Tensor*> tensors();

  /// Writes and publishes it. Gives what went wrong, on every rank, else nothing. Throws
  /// CommErrors, and where there is one rank only, what went wrong. A collective of any group of
  /// the same ranks.
  std::string write(const ProcessGroup& group, CheckpointFolder& folder) const;

 private:
  nlohmann::json write_own(const std::filesystem::path& folder, CheckpointHash hash) const;
  nlohmann::json own_or_error(const std::filesystem::path& folder, CheckpointHash hash) const;
  void complete(const std::filesystem::path& folder, const std::vector<nlohmann::json>& results,
                CheckpointHash hash) const;

  CheckpointInfo info_;
  int rank_ = 0;
  std::vector<PlannedShard> plan_;
};

}  // namespace lockstep::detail
