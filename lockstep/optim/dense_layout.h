#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

/// Whether `tensor` has an element for each place of a piece of memory, in any order of dimensions
/// (contiguous, channels-last): what kernels can take that go through memory element by element.
/// The memory of a lazily negated tensor holds other values, and zeros without memory have none.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
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

/// The part of a vector from `offset` on that has the shape of `like`, and its strides where that
/// is dense. Autograd does not know that it is a view: it would forbid to detach it in place, as
/// optimizers do with gradients.
inline at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  if (like.is_non_overlapping_and_dense())
    return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset() + offset);
  return flat.narrow(0, offset, like.numel()).view(like.sizes());
}

/// The elements of a tensor as a vector in the order in which view_like has those of `like`, which
/// has its shape. A copy where they do not lie so.
inline at::Tensor elements_like(const at::Tensor& tensor, const at::Tensor& like) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  if (!like.is_non_overlapping_and_dense()) return tensor.contiguous().view({-1});
  if (is_dense(tensor) && same_order(tensor, like)) return head(tensor, tensor.numel());
  at::Tensor ordered = at::empty_strided(like.sizes(), like.strides(), tensor.options());
  ordered.copy_(tensor);
  return head(ordered, ordered.numel());
}

/// The same elements in fewer tensors, for operations that treat every element alike. Tensors that
/// lie side by side in memory become one vector that shares their memory. Gradients that are views
/// of DistributedDataParallel's buckets lie so. What is not dense stays as it is. Tensors must not
/// overlap.
std::vector<at::Tensor> flat_runs(const std::vector<at::Tensor>& tensors);

/// The places of tensors of one dtype and device each, as LibTorch's list kernels want them.
std::vector<std::vector<size_t>> by_kind(const std::vector<at::Tensor>& tensors);

/// A piece of flat memory for each dtype and device, and views of it, one after the other.
struct FlatViews {
  std::vector<at::Tensor> memory;
  std::vector<at::Tensor> views;
};
/// Gives a vector of at least so many elements.
using MakeFlat = std::function<at::Tensor(int64_t elements, const at::TensorOptions& options)>;
/// A view for each of `tensors`, in whose order of memory it is, as fused optimizers want it.
FlatViews flat_views(const std::vector<at::Tensor>& tensors, const MakeFlat& make);

}  // namespace lockstep
