#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/comm/tensor_shard.h"

namespace lockstep {

/// What a checkpoint consists of, or what one rank gives to one that all ranks write.
struct CheckpointShards {
  CheckpointInfo info;             ///< That of rank 0 counts.
  std::vector<TensorShard> model;  ///< By the names of Python's state_dict.
  std::vector<TensorShard> state;  ///< "optimizer.*", and of one rank alone "rank3.*".
};

struct StoredFile {
  std::string name;
  uint64_t bytes = 0;
  CheckpointHash kind = CheckpointHash::xxh3;
  std::string hash;  ///< Hexadecimal.
};

/// A checkpoint of which any part can be read: whole tensors, the shards of each one after another,
/// in files or in memory. Its files must stay as long as it is read.
struct StoredCheckpoint : CheckpointShards {
  std::filesystem::path folder = {};  ///< Empty: all is in memory.
  std::vector<StoredFile> files = {};
  /// Of tensors, read from files by this process. What `check_files` reads does not count.
  std::shared_ptr<std::atomic<int64_t>> bytes_read = std::make_shared<std::atomic<int64_t>>(0);
};

/// Reads the description of a checkpoint and the headers of its files, and compares the sizes of
/// all. Throws as read_checkpoint.
StoredCheckpoint open_checkpoint(const std::filesystem::path& folder);

/// Compares the hashes of the files that `part` of `parts` readers are to look at: about as many
/// bytes for each. Throws DamagedCheckpointError.
void check_files(const StoredCheckpoint& checkpoint, int part = 0, int parts = 1);

/// Which boxes of a tensor are wanted; none: all of it. What lies outside of its sizes is ignored.
using WantedBoxes = std::function<const std::vector<TensorBox>*(const std::string& name)>;

/// Tensors of `shards`, the checkpoint's model or state, whose names begin with `prefix`, without
/// it, as whole tensors on the CPU. Of each only the wanted boxes are read. All else is zero, and
/// takes no memory until it is touched. Throws DamagedCheckpointError for a file that is too short,
/// and SystemError.
StateDict read_tensors(const StoredCheckpoint& checkpoint, const std::vector<TensorShard>& shards,
                       const std::string& prefix = {}, const WantedBoxes& wanted = {});

namespace detail {

Checkpoint whole(const StoredCheckpoint& stored);
void warn_of_other_libtorch(const StoredCheckpoint& checkpoint);

nlohmann::json to_json(const CheckpointInfo& info);
CheckpointInfo info_from(const nlohmann::json& object);

/// The description of a checkpoint, flushed to the disk: the last file of a folder.
void write_description(const StoredCheckpoint& checkpoint);

}  // namespace detail

}  // namespace lockstep
