#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/tensor_shard.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/tensor_reader.h"

/// Where tensors lie in files, as the readers of formats find out for TensorReader.
namespace lockstep::detail {

/// Bytes of a file in which elements lie, little-endian.
struct StoredBytes {
  std::filesystem::path path;
  ContentOptions where;
  uint64_t size = 0;  ///< Unpacked.
};

/// The tensor as one shard whose values are not at hand.
TensorShard described(const TensorInfo& tensor);

/// The tensor as one shard that lies in `bytes`, from element `first` on. Throws DataError, which
/// begins with `what`, unless all its elements do.
TensorShard shard_in_file(const TensorInfo& tensor, at::IntArrayRef strides, int64_t first,
                          std::shared_ptr<const StoredBytes> bytes, const std::string& what);

/// The elements that `shard`, a view of a storage in a file, describes: `stored`, or their
/// conjugates or negatives.
at::Tensor resolved(const at::Tensor& shard, const at::Tensor& stored);

/// The box of a tensor that is in these shards, on the CPU. Of a shard in a file the bytes from the
/// first element to the last are read: boxes of whole rows have no others between. The values are
/// copied to `into` where that is given. Adds the bytes that files gave to `bytes_read`.
at::Tensor read_box(std::span<const TensorShard> shards, const TensorBox& box, at::Tensor into = {},
                    std::atomic<int64_t>* bytes_read = nullptr);

struct StoredTensors {
  std::string format;
  std::vector<TensorInfo> tensors;  ///< In the order of the file. Of folders: by name.
  /// Of each tensor. Without overlap, they cover it.
  std::map<std::string, std::vector<TensorShard>> shards;
  std::map<std::string, PtFile::Value> values;
  std::map<std::string, std::string> metadata;

  void add(TensorShard whole);
};

/// Throws DataError, which begins with `source`, unless the shards cover the tensor exactly once.
/// Shards that are there twice (replicas) are dropped before. Writes its sizes into each.
void check_shards_cover(const TensorInfo& tensor, std::vector<TensorShard>& shards,
                        const std::string& source);

StoredTensors index_safetensors(const std::filesystem::path& path);

/// Gives the values of a shard that is described only.
using ReadShard = std::function<at::Tensor(const TensorShard&)>;

/// save_safetensors of boxes. Without `read` the shards have their values.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorShard>& shards,
                       const std::map<std::string, std::string>& metadata,
                       const ReadShard& read = {});

/// The bytes of such a file, from front to back, to `write`.
void write_safetensors(const std::vector<TensorShard>& shards,
                       const std::map<std::string, std::string>& metadata, const ReadShard& read,
                       const std::function<void(const void* data, size_t size)>& write);

/// Of a .pt file, or of one that lies within another file (`begin`, `size`). `root` is the name of
/// what was saved, before those of its parts.
StoredTensors index_pt(const std::filesystem::path& path, uint64_t begin = 0,
                       std::optional<uint64_t> size = {}, const std::string& root = {});

/// Safetensors files of `folder`. A tensor may be sharded over several.
StoredTensors index_safetensors_files(const std::vector<std::filesystem::path>& files,
                                      const std::filesystem::path& folder);

/// A folder of safetensors files.
StoredTensors index_safetensors_folder(const std::filesystem::path& folder,
                                       bool weights_only = false);

/// "model-00001-of-00002.safetensors" for the start "model", as Hugging Face counts files, from 1.
std::string numbered_file(const std::string& start, size_t number, size_t count);

/// The metadata of a file with boxes of tensors, as Python's HuggingFaceStorageWriter has it.
std::map<std::string, std::string> sharding_metadata(const std::vector<TensorShard>& shards);

/// Which tensor is in which file of a folder, and the bytes of all.
inline constexpr const char* kIndexFile = "model.safetensors.index.json";
std::string index_text(const std::map<std::string, std::string>& files, uint64_t bytes);

/// Writes files of at most `largest_file` bytes, or one tensor, and an index into an empty folder.
/// Python's HuggingFaceStorageReader and Hugging Face's libraries read it.
void write_safetensors_folder(const std::filesystem::path& folder, const TensorReader& source,
                              uint64_t largest_file);

/// Writes so many files, each with as many rows of every tensor, as torch.distributed.checkpoint
/// has them of so many ranks. What has no rows is in the first.
void write_safetensors_shards(const std::filesystem::path& folder, const TensorReader& source,
                              int64_t shards);

/// A folder of torch.distributed.checkpoint.
StoredTensors index_dcp_folder(const std::filesystem::path& folder);

}  // namespace lockstep::detail
