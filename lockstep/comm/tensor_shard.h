#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/state_dict.h"

namespace lockstep {

namespace detail {
struct StoredBytes;
}

/// A part of a tensor: `sizes[d]` indices from `offsets[d]` on, in each dimension.
struct TensorBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  bool is_empty() const;
};

/// What one rank or one file has of a tensor that is in parts, or each as a whole.
struct TensorShard {
  std::string name;
  std::vector<int64_t> sizes;    ///< Of the whole tensor.
  std::vector<int64_t> offsets;  ///< Of `values` in it.
  /// The box that begins there. On any device, with any strides. Of a shard elsewhere a meta
  /// tensor: its strides and storage offset are those in the file.
  at::Tensor values;
  /// Where the values are to be read; null where `values` has them, or where another rank has.
  std::shared_ptr<const detail::StoredBytes> file = {};

  TensorBox box() const { return {offsets, values.sizes().vec()}; }
};

/// Whole tensors as shards, with `prefix` before each name.
std::vector<TensorShard> whole_shards(const StateDict& tensors, const std::string& prefix = {});

/// The box of a tensor: a view.
at::Tensor part_of(at::Tensor tensor, const TensorBox& box);

/// Elements [begin, begin + count) of a tensor as few boxes. The elements count in the order in
/// which `like`, which has the tensor's sizes, has them in memory: row by row where its strides
/// have gaps. The boxes are in that order, too.
std::vector<TensorBox> boxes_of_range(const at::Tensor& like, int64_t begin, int64_t count);
/// The same with their values, which are a vector.
std::vector<TensorShard> shards_of_range(const std::string& name, const at::Tensor& like,
                                         int64_t begin, const at::Tensor& values);

namespace detail {

/// What both boxes of a tensor have. Sizes are below 0 where that is nothing.
TensorBox intersection(const TensorBox& a, const TensorBox& b);
/// Whether they have an element in common. Takes no memory.
bool overlap(const TensorBox& a, const TensorBox& b);
/// Whether the box lies in a tensor of these sizes.
bool is_within(const TensorBox& box, at::IntArrayRef sizes);

}  // namespace detail

}  // namespace lockstep
