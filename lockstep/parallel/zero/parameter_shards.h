#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/spread_state.h"

namespace lockstep::detail {

/// Parameters of one dtype and device that lie in one flat piece of memory, and which rank updates
/// what of it. Numbers are elements.
struct ShardBucket {
  std::vector<size_t> parameters;  ///< In the order in which they lie.
  std::vector<int64_t> offsets;    ///< Of each of them, a multiple of kCut.
  /// Rank r updates [bounds[r], bounds[r + 1]). The last is the length of the memory.
  std::vector<int64_t> bounds;
  /// Every rank updates as many elements as every other.
  bool is_even() const;
};
using ShardLayout = std::vector<ShardBucket>;

/// Parameters are cut at multiples of this many elements from their start only. LibTorch's kernels
/// take a tensor in full vectors, up to two at a time, and the rest one by one, which may round in
/// another way. A cut here leaves each element on its side. So the values do not depend on cuts.
inline constexpr int64_t kCut = 64;

/// Every rank updates as many elements of each bucket as every other. A parameter is cut where that
/// needs it, so each rank has at most one part of it. `buckets`: lists of parameters of one dtype
/// and device.
ShardLayout even_layout(const std::vector<at::Tensor>& parameters,
                        const std::vector<std::vector<size_t>>& buckets, int ranks);

/// Every parameter of `trained` belongs to one rank, by the algorithm of Python's
/// ZeroRedundancyOptimizer: largest first, each to the rank that has least. One bucket for each
/// dtype and device.
ShardLayout whole_layout(const std::vector<at::Tensor>& parameters,
                         const std::vector<size_t>& trained, int ranks);

/// `trained` in lists of one dtype and device, each of at most `cap` bytes or of one parameter, in
/// the order given.
std::vector<std::vector<size_t>> buckets_of(const std::vector<at::Tensor>& parameters,
                                            const std::vector<size_t>& trained, int64_t cap);

/// Parameters of which each rank of a group updates its own part. They are moved into flat memory,
/// in which the parts of a rank lie side by side, and stay the same tensors. One thread at a time.
class ParameterShards {
 public:
  /// Moves the parameters that the layout has. Not a collective.
  ParameterShards(std::vector<at::Tensor> parameters, ShardLayout layout, ProcessGroup group);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const ShardLayout& layout() const { return layout_; }
  const ProcessGroup& group() const { return group_; }
  /// Whether the layout has the parameter: it is one of those that are trained.
  bool has(size_t parameter) const { return place_[parameter].bucket != kNone; }
  /// Where the parameter lies, one that the layout has.
  struct Place {
    size_t bucket = kNone;
    int64_t offset = 0;
  };
  const Place& place(size_t parameter) const { return place_[parameter]; }
  /// What the rank updates of the parameter. Empty where that is nothing.
  Part part(int rank, size_t parameter) const;
  /// This rank's part of each parameter: the memory of the parameters, without autograd. A whole
  /// parameter has its own shape, a part of one is a vector, and nothing has no elements.
  const std::vector<at::Tensor>& parts() const { return parts_; }
  /// This rank's part of a tensor of the parameter's shape, in the shape of `parts()`. Shares its
  /// memory where that has the parameter's order.
  at::Tensor cut(size_t parameter, const at::Tensor& tensor) const;
  /// Takes the values of parameters that were given other memory (set_data, torch::load) into the
  /// flat one, where they lie from then on. Gives their indices. Throws UsageError for one of
  /// another shape or dtype; `what` begins it.
  std::vector<size_t> take_values(const std::string& what);
  /// Gives every rank the values of all parts. A collective.
  void share();
  /// The same for some parameters. What it returns must be waited for.
  [[nodiscard]] std::vector<Work> share(const std::vector<size_t>& parameters);

 private:
  static constexpr size_t kNone = SIZE_MAX;
  void move(size_t bucket);

  std::vector<at::Tensor> parameters_;
  ShardLayout layout_;
  ProcessGroup group_;
  std::vector<Place> place_;       ///< By parameter.
  std::vector<at::Tensor> flats_;  ///< By bucket.
  std::vector<at::Tensor> views_;  ///< By parameter, in `flats_`.
  std::vector<at::Tensor> parts_;  ///< By parameter.
};

}  // namespace lockstep::detail
