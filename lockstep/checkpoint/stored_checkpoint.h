#pragma once

#include <ATen/core/Tensor.h>

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

/// A box of a stored tensor: contiguous in a file, or in memory.
struct StoredPart {
  TensorBox box;
  std::string file;    ///< In the checkpoint's folder. Empty: `values` has it.
  uint64_t begin = 0;  ///< In the file.
  at::Tensor values = {};
};

struct StoredTensor {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<int64_t> sizes;
  std::vector<StoredPart> parts;  ///< They make up the tensor.
};

struct StoredFile {
  std::string name;
  uint64_t bytes = 0;
  CheckpointHash kind = CheckpointHash::xxh3;
  std::string hash;  ///< Hexadecimal.
};

/// A checkpoint of which any part can be read. Its files must stay as long as it is read.
struct StoredCheckpoint {
  CheckpointInfo info;
  std::filesystem::path folder;
  std::vector<StoredFile> files;
  std::vector<StoredTensor> model;
  std::vector<StoredTensor> state;
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

/// Tensors of `tensors` whose names begin with `prefix`, without it, as whole tensors on the CPU.
/// Of each only the wanted boxes are read. All else is zero, and takes no memory until it is
/// touched. Throws DamagedCheckpointError for a file that is too short, and SystemError.
StateDict read_tensors(const StoredCheckpoint& checkpoint, const std::vector<StoredTensor>& tensors,
                       const std::string& prefix = {}, const WantedBoxes& wanted = {});

namespace detail {

nlohmann::json to_json(const CheckpointInfo& info);
CheckpointInfo info_from(const nlohmann::json& object);

/// The description of a checkpoint, flushed to the disk: the last file of a folder.
void write_description(const StoredCheckpoint& checkpoint);

}  // namespace detail

}  // namespace lockstep
