#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <span>

namespace lockstep {

/// Reads a file of the IDX format, in which MNIST is published (http://yann.lecun.com/exdb/mnist,
/// "the IDX file format"), plain or gzip. Gives a tensor of the header's shape and dtype, in memory
/// of its own. The dtype is uint8, int8, int16, int32, float32 or float64, big-endian in the file.
/// Throws DataError naming the file, the offset and what was expected.
at::Tensor load_idx(const std::filesystem::path& path);
/// The same of a content that is unpacked already; the path is for messages. Bytes are not copied:
/// the tensor lies in `content`, which must outlive it.
at::Tensor load_idx(const std::filesystem::path& path, std::span<const std::byte> content);

}  // namespace lockstep
