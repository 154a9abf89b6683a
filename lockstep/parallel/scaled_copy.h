#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::detail {

/// target = source * factor, with the bits of at::mul_out. Same shape and device. They do not
/// overlap. In one pass and without LibTorch's dispatcher where it can be: that costs more than the
/// multiplication of a small layer's gradient.
void scaled_copy(const at::Tensor& target, const at::Tensor& source, double factor);
/// The same of `count` elements of vectors without gaps, from `from` in the source to `to` on.
void scaled_copy(const at::Tensor& target, int64_t to, const at::Tensor& source, int64_t from,
                 int64_t count, double factor);

}  // namespace lockstep::detail
