#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "lockstep/base/hash.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/stored_checkpoint.h"

namespace lockstep::detail {

/// A box of a tensor, and who writes it where.
struct PlannedPart {
  bool of_model = false;
  std::string name;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<int64_t> sizes;  ///< Of the whole tensor.
  TensorBox box;
  std::vector<int> holders;  ///< Ranks that have it.
  int writer = 0;
  std::string file;
  int64_t bytes() const;
};

/// What several ranks have is written by one of them, so that all write about as many bytes. A file
/// has a name once, so a rank that has several boxes of a tensor writes several files. `described`
/// is what each rank gave. The same on every rank. Throws CheckpointError where ranks disagree, or
/// have not all of a tensor.
std::vector<PlannedPart> plan_of(const std::vector<nlohmann::json>& described);

Hasher::Algorithm algorithm_of(CheckpointHash kind);

/// One checkpoint that all ranks of a group write together.
class ShardedSave {
 public:
  /// Agrees on who writes what. A collective. The group may be null: then there is one rank.
  ShardedSave(const ProcessGroup& group, const CheckpointShards& shards);

  /// What this rank is to write. To be replaced by copies where the tensors change meanwhile.
  std::map<size_t, at::Tensor>& tensors() { return tensors_; }

  /// Writes and publishes it. Gives what went wrong, on every rank, else nothing. Throws
  /// CommErrors, and where there is one rank only, what went wrong. A collective of any group of
  /// the same ranks.
  std::string write(const ProcessGroup& group, CheckpointFolder& folder) const;

 private:
  nlohmann::json write_own(const std::filesystem::path& folder, int rank,
                           CheckpointHash hash) const;
  nlohmann::json own_or_error(const std::filesystem::path& folder, int rank,
                              CheckpointHash hash) const;
  void complete(const std::filesystem::path& folder, const std::vector<nlohmann::json>& results,
                CheckpointHash hash) const;
  std::string write_as_first(const ProcessGroup& group, CheckpointFolder& folder) const;
  void write_as_other(const ProcessGroup& group) const;

  CheckpointInfo info_;
  std::vector<PlannedPart> plan_;
  std::map<size_t, at::Tensor> tensors_;  ///< By the number of their part.
};

}  // namespace lockstep::detail
