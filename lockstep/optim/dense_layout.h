#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

/// Whether `tensor` has an element for each place of a piece of memory, in any order of dimensions
/// (contiguous, channels-last). Kernels that go through memory element by element can take such
/// tensors.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense();
}

/// Whether the same place in memory is the same element in both, which must be dense and of one
/// shape. The strides of dimensions of size 1 say nothing.
inline bool same_order(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

/// The first `count` elements in memory order, as a vector that shares memory with a dense tensor.
inline at::Tensor head(const at::Tensor& tensor, int64_t count) {
  return tensor.as_strided({count}, {1}, tensor.storage_offset());
}

}  // namespace lockstep
