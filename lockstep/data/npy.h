#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

#include "lockstep/data/safetensors.h"

namespace lockstep {

/// Reads an array that numpy.save wrote (format versions 1 to 3): a contiguous CPU tensor in memory
/// of its own. Either byte order and either element order (C, Fortran). The dtype may be
/// bool, a signed or unsigned integer, float16, float32, float64, complex64 or complex128.
/// Structured arrays and Python objects are refused.
/// Throws DataError naming the file, the offset and what was expected.
at::Tensor load_npy(const std::filesystem::path& path);

/// Reads all arrays of a file that numpy.savez or numpy.savez_compressed wrote, by name, in the
/// order of the archive. Each array's checksum is compared.
StateDict load_npz(const std::filesystem::path& path);

}  // namespace lockstep
