#include "lockstep/data/stored_tensors.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <bit>

#include "lockstep/base/error.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep::detail {
namespace {

std::string box_text(const TensorBox& box) {
  return shape_text(box.sizes) + " at " + shape_text(box.offsets);
}

/// `size` bytes from `begin` on, as a uint8 tensor.
at::Tensor read_storage(const StoredBytes& bytes, uint64_t begin, uint64_t size,
                        const std::string& what) {
  ContentOptions where = bytes.where;
  const bool whole = size == bytes.size || where.packing == ContentOptions::Packing::deflate;
  if (!whole) {
    where.begin += begin;
    where.size = size;
  }
  ContentReader reader(bytes.path, where);
  at::Tensor read = read_tensor(reader, at::kByte, static_cast<int64_t>(whole ? bytes.size : size),
                                std::endian::little, what);
  if (!whole) return read;
  reader.expect_end();
  return size == bytes.size
             ? read
             : read.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(size)).clone();
}

/// A part of a shard, which describes where its elements lie in the file. The result may have gaps.
at::Tensor read_part(const at::Tensor& part, const StoredBytes& file, const std::string& name) {
  const std::string what = "tensor '" + name + "'";
  // Memory that a file of few bytes could ask for, by strides of 0.
  constexpr int64_t kLargest = 1 << 24;
  if (part.numel() > kLargest && static_cast<uint64_t>(part.numel()) > file.size)
    throw DataError(what + " has more elements than its storage has bytes",
                    "save it without expand()");
  int64_t elements = 1;
  for (int64_t d = 0; d < part.dim(); ++d) elements += (part.size(d) - 1) * part.stride(d);
  const uint64_t width = part.element_size();
  const auto first = static_cast<uint64_t>(part.storage_offset());
  const at::Tensor bytes =
      read_storage(file, first * width, static_cast<uint64_t>(elements) * width, what);
  if (part.scalar_type() == at::kBool && bytes.gt(1).any().item<bool>())
    throw DataError(file.path.string() + ": " + what +
                    " has a byte other than 0 or 1 for a boolean: the file is damaged");
  return resolved(part, at::empty({0}, at::dtype(part.dtype()))
                            .set_(bytes.storage(), 0, part.sizes(), part.strides()));
}

}  // namespace

void StoredTensors::add(TensorShard whole) {
  tensors.push_back({whole.name, whole.values.scalar_type(), whole.sizes});
  shards[whole.name].push_back(std::move(whole));
}

TensorShard described(const TensorInfo& tensor) {
  return {tensor.name, tensor.shape, std::vector<int64_t>(tensor.shape.size()),
          at::empty(tensor.shape, at::dtype(tensor.dtype).device(at::kMeta))};
}

TensorShard shard_in_file(const TensorInfo& tensor, at::IntArrayRef strides, int64_t first,
                          std::shared_ptr<const StoredBytes> bytes, const std::string& what) {
  const auto elements = static_cast<int64_t>(bytes->size / at::elementSize(tensor.dtype));
  bool fits = first >= 0 && tensor.shape.size() == strides.size() &&
              bytes_of_shape(tensor.dtype, tensor.shape);
  int64_t last = first;
  for (size_t i = 0; fits && i < strides.size(); ++i) {
    int64_t reach = 0;
    fits = !__builtin_mul_overflow(std::max<int64_t>(tensor.shape[i] - 1, 0), strides[i], &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
  const bool is_empty = std::count(tensor.shape.begin(), tensor.shape.end(), 0) > 0;
  if (!fits || (is_empty ? first > elements : last >= elements))
    throw DataError(what + " reaches over the end of its storage of " + std::to_string(elements) +
                    " elements: the file is damaged");
  return {tensor.name, tensor.shape, std::vector<int64_t>(tensor.shape.size()),
          at::empty({elements}, at::dtype(tensor.dtype).device(at::kMeta))
              .as_strided(tensor.shape, strides, first),
          std::move(bytes)};
}

at::Tensor resolved(const at::Tensor& shard, const at::Tensor& stored) {
  const at::Tensor conjugated = shard.is_conj() ? stored.conj_physical() : stored;
  return shard.is_neg() ? conjugated.neg() : conjugated;
}

at::Tensor read_box(std::span<const TensorShard> shards, const TensorBox& box, at::Tensor into,
                    std::atomic<int64_t>* bytes_read) {
  const auto options = at::dtype(shards.front().values.dtype());
  if (box.is_empty()) return into.defined() ? into : at::empty(box.sizes, options);
  for (const TensorShard& shard : shards) {
    const TensorBox both = intersection(box, shard.box());
    if (both.is_empty()) continue;
    TensorBox of_shard = both, of_box = both;
    for (size_t d = 0; d < both.sizes.size(); ++d) {
      of_shard.offsets[d] -= shard.offsets[d];
      of_box.offsets[d] -= box.offsets[d];
    }
    at::Tensor values = part_of(shard.values, of_shard);
    if (shard.file) {
      values = read_part(values, *shard.file, shard.name);
      if (bytes_read) *bytes_read += static_cast<int64_t>(values.storage().nbytes());
    }
    if (!into.defined()) {
      // Not those in memory, which may change.
      if (both.sizes == box.sizes && shard.file) return values.contiguous();
      into = at::empty(box.sizes, options);
    }
    part_of(into, of_box).copy_(values);
  }
  return into;
}

void check_shards_cover(const TensorInfo& tensor, std::vector<TensorShard>& shards,
                        const std::string& source) {
  constexpr size_t kMostShards = 20'000;  // Each is compared with each other one.
  const auto fail = [&](const std::string& what) {
    throw DataError(source + ": tensor '" + tensor.name + "' " + what,
                    "a file is missing or damaged, or is of another checkpoint");
  };
  const auto wanted = bytes_of_shape(tensor.dtype, tensor.shape);
  if (!wanted) fail("has a shape that is too large");
  if (shards.size() > kMostShards) fail("is in " + std::to_string(shards.size()) + " shards");
  const auto key = [](const TensorShard& shard) {
    return std::pair(shard.offsets, shard.values.sizes().vec());
  };
  std::stable_sort(shards.begin(), shards.end(),
                   [&](const auto& a, const auto& b) { return key(a) < key(b); });
  shards.erase(std::unique(shards.begin(), shards.end(),
                           [&](const auto& a, const auto& b) { return key(a) == key(b); }),
               shards.end());
  uint64_t covered = 0;
  std::vector<TensorBox> boxes;
  for (TensorShard& shard : shards) {
    const TensorBox box = shard.box();
    if (!is_within(box, tensor.shape)) fail("has a shard beyond its shape: " + box_text(box));
    for (const TensorBox& other : boxes) {
      if (overlap(box, other))
        fail("has shards that overlap: " + box_text(other) + " and " + box_text(box));
    }
    boxes.push_back(box);
    covered += shard.values.nbytes();
    shard.sizes = tensor.shape;
  }
  if (covered != *wanted || shards.empty())
    fail("is not whole: its shards have " + std::to_string(covered) + " bytes of it");
}

}  // namespace lockstep::detail
