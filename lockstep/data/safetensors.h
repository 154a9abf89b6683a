#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "lockstep/base/state_dict.h"

namespace lockstep {

/// A file of the safetensors format (https://github.com/huggingface/safetensors): what Python's
/// `safetensors` package writes and reads.
struct SafetensorsFile {
  StateDict tensors;                            ///< In the order of their bytes in the file.
  std::map<std::string, std::string> metadata;  ///< The header's __metadata__.
};

/// Reads a whole file. Each tensor is contiguous, on the CPU, in its own memory. Supports every
/// dtype of the format that ATen has: BOOL, U8 to U64, I8 to I64, F8_E4M3, F8_E5M2, F8_E8M0, F16,
/// BF16, F32, F64, C64. Throws DataError when the file is truncated, damaged or of another format.
/// The error names the file, the offset and what was expected. Throws SystemError when the file
/// cannot be opened or read.
SafetensorsFile load_safetensors(const std::filesystem::path& path);

/// Writes atomically: to a temporary file, which is flushed and renamed, so a reader never sees a
/// part. Tensors may be on any device and have any strides. They are written contiguous and
/// little-endian. Tensors with wider elements come first, so that each starts aligned. Otherwise
/// the given order is kept. Throws SystemError (a full disk, a read-only folder) and leaves nothing
/// behind. Throws Error for a tensor that the format cannot hold and for a name that is given twice
/// or reserved.
void save_safetensors(const std::filesystem::path& path, const StateDict& tensors,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
