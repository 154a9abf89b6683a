#include "lockstep/data/stored_tensors.h"

#include <algorithm>
#include <tuple>

#include "lockstep/base/error.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep::detail {
namespace {

std::string box_text(const StoredChunk& chunk) {
  return shape_text(chunk.sizes) + " at " + shape_text(chunk.offsets);
}

bool overlap(const StoredChunk& a, const StoredChunk& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.offsets[d] + a.sizes[d] <= b.offsets[d] || b.offsets[d] + b.sizes[d] <= a.offsets[d])
      return false;
  }
  return true;
}

}  // namespace

bool Box::is_empty() const {
  return std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size <= 0; });
}

Box intersection(const Box& a, const Box& b) {
  Box both;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    both.offsets.push_back(begin);
    both.sizes.push_back(end - begin);
  }
  return both;
}

bool is_within(at::IntArrayRef offsets, at::IntArrayRef sizes, at::IntArrayRef shape) {
  if (sizes.size() != shape.size() || offsets.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (offsets[d] < 0 || sizes[d] < 0 || sizes[d] > shape[d] || offsets[d] > shape[d] - sizes[d])
      return false;
  }
  return true;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d > 1; --d)
    strides[d - 2] = strides[d - 1] * std::max<int64_t>(shape[d - 1], 1);
  return strides;
}

void check_chunk_fits(const StoredChunk& chunk, at::ScalarType dtype, const std::string& what) {
  const auto elements = static_cast<int64_t>(chunk.bytes->size / at::elementSize(dtype));
  bool fits = chunk.first >= 0 && chunk.sizes.size() == chunk.strides.size() &&
              bytes_of_shape(dtype, chunk.sizes);
  int64_t last = chunk.first;
  for (size_t i = 0; fits && i < chunk.sizes.size(); ++i) {
    int64_t reach = 0;
    fits = !__builtin_mul_overflow(std::max<int64_t>(chunk.sizes[i] - 1, 0), chunk.strides[i],
                                   &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  const bool is_empty = std::count(chunk.sizes.begin(), chunk.sizes.end(), 0) > 0;
  if (!fits || (is_empty ? chunk.first > elements : last >= elements))
    throw DataError(what + " reaches over the end of its storage of " + std::to_string(elements) +
                    " elements: the file is damaged");
}

void check_chunks_cover(StoredTensor& tensor, const std::string& source) {
  constexpr size_t kMostChunks = 20'000;  // Each is compared with each other one.
  const auto fail = [&](const std::string& what) {
    throw DataError(source + ": tensor '" + tensor.name + "' " + what,
                    "a file is missing or damaged, or is of another checkpoint");
  };
  const auto wanted = bytes_of_shape(tensor.dtype, tensor.shape);
  if (!wanted) fail("has a shape that is too large");
  auto& chunks = tensor.chunks;
  if (chunks.size() > kMostChunks) fail("is in " + std::to_string(chunks.size()) + " shards");
  const auto box = [](const StoredChunk& chunk) { return std::tie(chunk.offsets, chunk.sizes); };
  std::stable_sort(chunks.begin(), chunks.end(),
                   [&](const auto& a, const auto& b) { return box(a) < box(b); });
  chunks.erase(std::unique(chunks.begin(), chunks.end(),
                           [&](const auto& a, const auto& b) { return box(a) == box(b); }),
               chunks.end());
  uint64_t covered = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (!is_within(chunks[i].offsets, chunks[i].sizes, tensor.shape))
      fail("has a shard beyond its shape: " + box_text(chunks[i]));
    const uint64_t bytes = bytes_of_shape(tensor.dtype, chunks[i].sizes).value();
    covered += bytes;
    for (size_t j = 0; j < i && bytes > 0; ++j) {
      if (overlap(chunks[i], chunks[j]))
        fail("has shards that overlap: " + box_text(chunks[j]) + " and " + box_text(chunks[i]));
    }
  }
  if (covered != *wanted || chunks.empty())
    fail("is not whole: its shards have " + std::to_string(covered) + " bytes of it");
}

}  // namespace lockstep::detail
