#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

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
/// ZeroRedundancyOptimizer: largest first, each to the rank that has least. `sizes`: the elements
/// that each rank has already, and afterwards has. One bucket for each dtype and device.
ShardLayout whole_layout(const std::vector<at::Tensor>& parameters,
                         const std::vector<size_t>& trained, std::vector<int64_t>& sizes);

/// `trained` in lists of one dtype and device, each of at most `cap` bytes or of one parameter, in
/// the order given.
std::vector<std::vector<size_t>> buckets_of(const std::vector<at::Tensor>& parameters,
                                            const std::vector<size_t>& trained, int64_t cap);

}  // namespace lockstep::detail
