#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::detail {

/// Where parameters begin in flat memory, and where they are cut: at multiples of so many elements
/// from their start. LibTorch's kernels take a tensor in full vectors, up to two at a time, and the
/// rest one by one, which may round in another way. A cut here leaves each element on its side. So
/// the values do not depend on cuts.
inline constexpr int64_t kFlatBlock = 64;
constexpr int64_t up_to_block(int64_t elements) {
  return (elements + kFlatBlock - 1) / kFlatBlock * kFlatBlock;
}

/// Elements [begin, end) of a parameter, in the order of its memory.
struct Part {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

struct FlatParameter {
  std::string name;
  at::Tensor tensor;   ///< Its owner's own.
  size_t index = 0;    ///< Among its owner's.
  int64_t offset = 0;  ///< Of its first element in the unit.
};

/// Parameters of one dtype and device that lie one after the other in flat memory, and which rank
/// has what of it. Numbers are elements.
struct FlatUnit {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<FlatParameter> parameters;
  /// Rank r has [bounds[r], bounds[r + 1]). The last is the length of the memory.
  std::vector<int64_t> bounds = {0};

  void add(std::string name, const at::Tensor& tensor, size_t index);
  /// Behind the last parameter.
  int64_t end() const;
  /// Gives every rank as many elements as every other. `spare`: how many at least no parameter has.
  void cut_evenly(int ranks, int64_t spare = 0);
  bool is_even() const;
  /// Of an even unit: what each rank has.
  int64_t shard_size() const { return bounds.at(1); }
  int64_t length() const { return bounds.back(); }
  int64_t begin_of(int rank) const { return bounds.at(static_cast<size_t>(rank)); }
  /// What the rank has of one of the parameters. Empty where that is nothing.
  Part part(int rank, const FlatParameter& parameter) const;
};

/// What of one parameter lies in one rank's shard: a run of it in the order of memory.
struct Piece {
  size_t unit = 0;
  size_t parameter = 0;      ///< In the unit.
  int64_t begin = 0;         ///< In the parameter.
  int64_t size = 0;          ///< At least 1.
  int64_t shard_offset = 0;  ///< In the rank's shard.
};

/// All pieces of a rank, in the order of units and parameters.
std::vector<Piece> pieces_of(const std::vector<FlatUnit>& units, int rank);

}  // namespace lockstep::detail
