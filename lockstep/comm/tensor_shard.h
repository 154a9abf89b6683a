#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/state_dict.h"

namespace lockstep {

class ProcessGroup;

/// A part of a tensor: `sizes[d]` indices from `offsets[d]` on, in each dimension.
struct TensorBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
};

/// What one rank has of a tensor that ranks have in parts, or each as a whole.
struct TensorShard {
  std::string name;
  std::vector<int64_t> sizes;    ///< Of the whole tensor.
  std::vector<int64_t> offsets;  ///< Of `values` in it.
  at::Tensor values;             ///< The box that begins there. On any device, with any strides.
};

/// Whole tensors as shards, with `prefix` before each name.
std::vector<TensorShard> whole_shards(const StateDict& tensors, const std::string& prefix = {});

/// Elements [begin, begin + count) of a tensor as few boxes. The elements count in the order in
/// which `like`, which has the tensor's sizes, has them in memory: row by row where its strides
/// have gaps. The boxes are in that order, too.
std::vector<TensorBox> boxes_of_range(const at::Tensor& like, int64_t begin, int64_t count);
/// The same with their values, which are a vector.
std::vector<TensorShard> shards_of_range(const std::string& name, const at::Tensor& like,
                                         int64_t begin, const at::Tensor& values);

namespace detail {

/// The tensors of rank `source`, on the CPU of every rank. `own` counts there only. They are sent
/// on `device`; none: where the group's backend communicates. A collective.
StateDict broadcast_state(const ProcessGroup& group, const StateDict& own, int source,
                          std::optional<c10::Device> device = {});

}  // namespace detail

}  // namespace lockstep
