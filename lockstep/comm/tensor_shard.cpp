#include "lockstep/comm/tensor_shard.h"

#include <algorithm>
#include <functional>
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

/// Of elements [begin, end) within what `offsets` chooses in the dimensions before `dim`.
void add_boxes(const std::vector<int64_t>& sizes, size_t dim, std::vector<int64_t> offsets,
               int64_t begin, int64_t end, std::vector<TensorBox>& boxes) {
  if (begin >= end) return;
  std::vector<int64_t> box = sizes;
  std::fill_n(box.begin(), dim, 1);
  if (dim == sizes.size()) return boxes.push_back({std::move(offsets), std::move(box)});
  const int64_t row = std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(dim) + 1,
                                      sizes.end(), int64_t{1}, std::multiplies<>());
  const auto add_part_of_row = [&](int64_t index, int64_t from, int64_t to) {
    offsets[dim] = index;
    add_boxes(sizes, dim + 1, offsets, from, to, boxes);
  };
  int64_t first = begin / row;
  const int64_t last = end / row;
  if (begin % row != 0) {
    add_part_of_row(first, begin % row, std::min(row, end - first * row));
    ++first;
  }
  if (first < last) {
    offsets[dim] = first;
    box[dim] = last - first;
    boxes.push_back({offsets, box});
  }
  if (first <= last) add_part_of_row(last, 0, end - last * row);
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
  const std::vector<int64_t> order = memory_order(like), back = inverse(order);
  const std::vector<int64_t> sizes = reordered(like.sizes().vec(), order);
  std::vector<TensorBox> boxes;
  add_boxes(sizes, 0, std::vector<int64_t>(sizes.size()), begin, begin + count, boxes);
  for (TensorBox& box : boxes) box = {reordered(box.offsets, back), reordered(box.sizes, back)};
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
