#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/data/safetensors.h"

namespace lockstep {

namespace detail {
struct StoredTensors;
}

/// What torch.save has written: a tree of dicts and lists, flat. A name is the way to the value,
/// joined by dots: "optimizer.state.0.exp_avg".
struct PtFile {
  using Value = std::variant<std::monostate, bool, int64_t, double, std::string>;

  StateDict tensors;                    ///< In the order of the file.
  std::map<std::string, Value> values;  ///< What is no tensor. std::monostate is None.
};

/// Reads a .pt file: what torch.save in Python writes (since PyTorch 1.6: a zip archive with a
/// pickle of protocol 2 to 5), LibTorch's torch::save of a module, and save_pt. Tensors are on the
/// CPU and have their bits, shapes and strides. Those that share a storage in Python share it here,
/// but for lazy conjugates and negatives (Tensor.is_conj, is_neg), whose values are computed.
///
/// No code of the file is run. A class is known by its arguments, items and attributes only. Of a
/// module that was saved whole there is what its state_dict has, by the same names. Keys that are
/// no texts are named as Python prints them. Tensors that are not dense (sparse, quantized), or of
/// a dtype that is not known, are left out: a warning names them, and they are among the values.
///
/// Throws DataError for a file that is damaged or of another format, for two tensors of one name,
/// and for more than 20 million values. Throws SystemError when the file cannot be opened or read.
PtFile load_pt(const std::filesystem::path& path);

/// Writes a state_dict that Python's `torch.load(path, weights_only=True)` reads, through an
/// AtomicFile. Tensors may be on any device and of any strides. It takes the memory of one more
/// copy. Throws UsageError for a name that is given twice, and SystemError (a full disk, a
/// read-only folder) and leaves nothing behind.
void save_pt(const std::filesystem::path& path, const StateDict& tensors);

struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<int64_t> shape;
};

/// The tensors of a file or folder, read one at a time or in part. The content decides what it is:
/// - a safetensors file, with the tied names that Python's save_model left out,
/// - a .pt file: see load_pt,
/// - a folder of safetensors files, with or without model.safetensors.index.json. A tensor may be
///   sharded over files, as Python's HuggingFaceStorageWriter leaves it (DCP_SHARDING_INFO),
/// - a folder of torch.distributed.checkpoint (.metadata and *.distcp),
/// - a folder with a link `latest` to one of these, as `lockstep train` keeps its checkpoints.
///
/// The files must not change while this object lives. Any thread may read, several at a time.
class TensorReader {
 public:
  /// Reads headers and no values. Throws DataError for what is missing, damaged or of another
  /// format, and for a tensor whose shards overlap or leave a part out. Throws SystemError where a
  /// file cannot be read. `weights_only` leaves out what a checkpoint of Lockstep has besides the
  /// model: the optimizer's state.
  explicit TensorReader(const std::filesystem::path& path, bool weights_only = false);

  /// "safetensors", "pt", "hf" or "dcp".
  const std::string& format() const;
  /// In the order of the file. Of folders: by name.
  const std::vector<TensorInfo>& tensors() const;
  /// What is no tensor: of .pt files and of dcp.
  const std::map<std::string, PtFile::Value>& values() const;
  /// Safetensors' __metadata__, without that of shards.
  const std::map<std::string, std::string>& metadata() const;

  /// One tensor, whole, on the CPU. Throws DataError naming it when the source has none of that
  /// name, and when it is damaged. Checksums (pt, dcp) are compared of storages that are read
  /// whole.
  at::Tensor read(const std::string& name) const;
  /// The box of these sizes that begins at `offsets`. From each shard that it touches the bytes
  /// from its first element to its last are read. Throws UsageError for a box beyond the shape.
  at::Tensor read(const std::string& name, at::IntArrayRef offsets, at::IntArrayRef sizes) const;

  /// Reads every byte, compares the checksums that there are (pt, dcp), and gives the tensors that
  /// are damaged, with what is wrong.
  std::vector<std::pair<std::string, std::string>> damage() const;

 private:
  std::shared_ptr<const detail::StoredTensors> stored_;
};

/// "safetensors", "pt" and "hf", a folder of safetensors files with an index.
std::vector<std::string> tensor_formats();

/// By the extension: .safetensors, or .pt, .pth or .bin. Empty for another one.
std::string format_of_name(const std::filesystem::path& path);

/// Writes all tensors into a file, atomically, or into a new folder ("hf"), in files of at most
/// 5 GB. Throws DataError for a source without tensors. With `shards` in so many files, each with
/// as many rows of every tensor. safetensors and hf take the memory of one tensor, pt of two copies
/// of all. An hf folder is read by Python's HuggingFaceStorageReader, which reshards, and by
/// Hugging Face's libraries. Throws UsageError for a folder that is there and not empty,
/// SystemError, and what reading throws.
void convert_tensors(const TensorReader& source, const std::filesystem::path& target,
                     const std::string& format, int64_t shards = 0);

}  // namespace lockstep
