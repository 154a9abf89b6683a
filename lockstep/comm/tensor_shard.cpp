#include "lockstep/comm/tensor_shard.h"

#include <algorithm>
#include <numeric>

namespace lockstep {
namespace {

/// The dimensions, that of the longest stride first.
std::vector<int64_t> memory_order(const at::Tensor& like) {
  std::vector<int64_t> dims(static_cast<size_t>(like.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  if (like.is_contiguous() || !like.is_non_overlapping_and_dense()) return dims;
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  return dims;
}

std::vector<int64_t> reordered(const std::vector<int64_t>& numbers,
                               const std::vector<int64_t>& order) {
  std::vector<int64_t> result;
  for (const int64_t from : order) result.push_back(numbers[static_cast<size_t>(from)]);
  return result;
}

std::vector<int64_t> inverse(const std::vector<int64_t>& order) {
  std::vector<int64_t> result(order.size());
  for (size_t i = 0; i < order.size(); ++i)
    result[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return result;
}

}  // namespace

std::vector<TensorShard> whole_shards(const StateDict& tensors, const std::string& prefix) {
  std::vector<TensorShard> shards;
  for (const auto& [name, tensor] : tensors) {
    const auto dims = static_cast<size_t>(tensor.dim());
    shards.push_back(
        {prefix + name, tensor.sizes().vec(), std::vector<int64_t>(dims), tensor.detach()});
  }
  return shards;
}

at::Tensor part_of(at::Tensor tensor, const TensorBox& box) {
  for (size_t d = 0; d < box.sizes.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), box.offsets[d], box.sizes[d]);
  return tensor;
}

std::vector<TensorBox> boxes_of_range(const at::Tensor& like, int64_t begin, int64_t count) {
  const std::vector<int64_t> order = memory_order(like);
  const int64_t end = begin + count;
  std::vector<TensorBox> boxes;
  while (begin < end) {
    TensorBox box{std::vector<int64_t>(order.size()), std::vector<int64_t>(order.size(), 1)};
    int64_t row = like.numel(), taken = 1;
    bool is_whole_row = false;  // Within the first dimension whose indices are taken whole.
    for (const int64_t dim : order) {
      const auto d = static_cast<size_t>(dim);
      if (is_whole_row) {
        box.sizes[d] = like.size(dim);
        continue;
      }
      row /= like.size(dim);
      box.offsets[d] = begin / row % like.size(dim);
      is_whole_row = begin % row == 0 && end - begin >= row;
      if (!is_whole_row) continue;
      box.sizes[d] = std::min((end - begin) / row, like.size(dim) - box.offsets[d]);
      taken = box.sizes[d] * row;
    }
    begin += taken;
    boxes.push_back(std::move(box));
  }
  return boxes;
}

std::vector<TensorShard> shards_of_range(const std::string& name, const at::Tensor& like,
                                         int64_t begin, const at::Tensor& values) {
  const std::vector<int64_t> order = memory_order(like), back = inverse(order);
  std::vector<TensorShard> shards;
  int64_t from = 0;
  for (const TensorBox& box : boxes_of_range(like, begin, values.numel())) {
    const at::Tensor part = values.detach().narrow(0, from, c10::multiply_integers(box.sizes));
    from += part.numel();
    shards.push_back({name, like.sizes().vec(), box.offsets,
                      part.view(reordered(box.sizes, order)).permute(back)});
  }
  return shards;
}

bool TensorBox::is_empty() const {
  return std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size <= 0; });
}

TensorBox detail::intersection(const TensorBox& a, const TensorBox& b) {
  TensorBox both;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    both.offsets.push_back(begin);
    both.sizes.push_back(end - begin);
  }
  return both;
}

bool detail::overlap(const TensorBox& a, const TensorBox& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (std::max(a.offsets[d], b.offsets[d]) >=
        std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]))
      return false;
  }
  return true;
}

bool detail::is_within(const TensorBox& box, at::IntArrayRef sizes) {
  if (box.sizes.size() != sizes.size() || box.offsets.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.sizes[d] > sizes[d] ||
        box.offsets[d] > sizes[d] - box.sizes[d])
      return false;
  }
  return true;
}

}  // namespace lockstep
