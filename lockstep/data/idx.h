#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <filesystem>
#include <span>

namespace lockstep {

/// Reads a file of bytes of the IDX format, in which MNIST is published
/// (http://yann.lecun.com/exdb/mnist, "the IDX file format"), plain or gzip. Gives a uint8 tensor
/// of the header's shape, in memory of its own. Throws DataError naming the file, the offset and
/// what was expected, also for a file of other elements than unsigned bytes.
at::Tensor load_idx(const std::filesystem::path& path);
/// The same of a content that is unpacked already; the path is for messages. Nothing is copied: the
/// tensor lies in `content`, which must outlive it.
at::Tensor load_idx(const std::filesystem::path& path, std::span<const std::byte> content);

}  // namespace lockstep
