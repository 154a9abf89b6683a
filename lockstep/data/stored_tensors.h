#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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

/// A box of a tensor: elements of `bytes`.
struct StoredChunk {
  std::vector<int64_t> offsets;  ///< Of its first element in the tensor.
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  ///< In elements.
  int64_t first = 0;             ///< Element of `bytes`.
  std::shared_ptr<const StoredBytes> bytes;
  bool conj = false;  ///< The elements are the conjugates of what is stored.
  bool neg = false;   ///< The elements are the negatives of what is stored.
};

/// The chunk's elements by those that are stored: conjugated, negated, or as they are.
at::Tensor resolved(const StoredChunk& chunk, const at::Tensor& stored);

struct StoredTensor : TensorInfo {
  std::vector<StoredChunk> chunks;  ///< Without overlap, they cover the shape.
};

/// A box in a tensor.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  bool is_empty() const;
};

/// What both have. Sizes are below 0 where that is nothing.
Box intersection(const Box& a, const Box& b);

/// The elements of a box that lies in the chunk, both in the tensor. Reads from the first one to
/// the last: boxes of whole rows have no others between. The result may have gaps.
at::Tensor read_part(const TensorInfo& tensor, const StoredChunk& chunk, const Box& box);

struct StoredTensors {
  std::string format;
  std::vector<TensorInfo> infos;  ///< Of `tensors`, in the same order.
  std::vector<StoredTensor> tensors;
  std::map<std::string, size_t> index;  ///< Of `tensors`, by name.
  std::map<std::string, PtFile::Value> values;
  std::map<std::string, std::string> metadata;
};

/// Throws DataError unless the chunk's elements lie within its bytes.
void check_chunk_fits(const StoredChunk& chunk, at::ScalarType dtype, const std::string& what);

/// Throws DataError, which begins with `source`, unless the chunks cover the shape exactly once.
/// Chunks that are there twice (replicas) are dropped before.
void check_chunks_cover(StoredTensor& tensor, const std::string& source);

/// Whether a box lies in a tensor of this shape.
bool is_within(at::IntArrayRef offsets, at::IntArrayRef sizes, at::IntArrayRef shape);
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape);

StoredTensors index_safetensors(const std::filesystem::path& path);

/// save_safetensors of tensors that `read` gives one after another, by their place in `tensors`.
void write_safetensors(const std::filesystem::path& path, const std::vector<TensorInfo>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<at::Tensor(size_t)>& read);

/// The bytes of such a file, from front to back, to `write`.
void write_safetensors(const std::vector<TensorInfo>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<at::Tensor(size_t)>& read,
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

/// The metadata of a file with boxes of tensors, which begin at these offsets, as Python's
/// HuggingFaceStorageWriter has it.
std::map<std::string, std::string> sharding_metadata(
    const std::vector<TensorInfo>& boxes, const std::vector<std::vector<int64_t>>& offsets);

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
