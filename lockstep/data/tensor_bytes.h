#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/data/content_reader.h"

namespace lockstep {

static_assert(std::endian::native == std::endian::little, "files of tensors are read as they lie");

/// Reads a contiguous CPU tensor of this dtype and shape whose elements are next in the file, in
/// the given byte order. The file's remaining_limit() is checked before memory is taken, so a
/// damaged header cannot ask for more than the file could hold. `what` names the tensor in
/// messages. Throws DataError (see ContentReader), also for a boolean that is neither 0 nor 1.
at::Tensor read_tensor(ContentReader& file, at::ScalarType dtype, at::IntArrayRef shape,
                       std::endian order, const std::string& what);

/// The bytes of a tensor of this shape. None when a size is negative, and when it is too large for
/// PyTorch, whose strides must fit into 63 bits even when a size is 0.
std::optional<uint64_t> bytes_of_shape(at::ScalarType dtype, at::IntArrayRef shape);

/// "3 x 28 x 28", "scalar".
std::string shape_text(at::IntArrayRef shape);

}  // namespace lockstep
