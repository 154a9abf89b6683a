#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// Tensors by name in the order in which they are to be written.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A file of the safetensors format (https://github.com/huggingface/safetensors): what Python's
/// `safetensors` package writes and reads.
struct SafetensorsFile {
  NamedTensors tensors;                         ///< In the order of their bytes in the file.
  std::map<std::string, std::string> metadata;  ///< The header's __metadata__.
};

/// Reads a whole file into memory of its own. Throws DataError naming the file, the offset and what
/// was expected when it is truncated, damaged or of another format.
SafetensorsFile load_safetensors(const std::filesystem::path& path);

/// Writes through an AtomicFile (written aside, flushed, renamed): a reader never sees a part.
/// Tensors may be on any device and of any strides; they are written contiguous, little-endian.
/// Throws SystemError (a full disk, a read-only folder) and leaves nothing behind.
void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
