#include "lockstep/data/tensor_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "lockstep/base/error.h"
#include "lockstep/data/stored_tensors.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

using detail::Box;
using detail::StoredBytes;
using detail::StoredChunk;
using detail::StoredTensor;
using detail::StoredTensors;

StoredTensors index_of_file(const fs::path& path) {
  ContentReader reader(path, {.packing = ContentOptions::Packing::plain});
  std::string start(9, '\0');
  start.resize(reader.read_some(start.data(), start.size()));
  if (start.starts_with("PK")) return detail::index_pt(path);
  if (start.size() < 9 || start[8] == '{') return detail::index_safetensors(path);
  if (start.starts_with("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9")) {
    throw DataError(path.string() + ": this is torch.save's format of before PyTorch 1.6",
                    "write it anew in Python: torch.save(torch.load(FILE), NEW_FILE)");
  }
  throw DataError(path.string() + ": this is neither a safetensors file nor a .pt file",
                  "give one of these, or a folder of weights; a file of these that begins with "
                  "something else is damaged");
}

StoredTensors index_of(const fs::path& path, bool weights_only) {
  std::error_code ignored;
  if (!fs::exists(path, ignored))
    throw DataError(path.string() + ": there is no such file or folder");
  if (!fs::is_directory(path, ignored)) return index_of_file(path);
  if (fs::exists(path / ".metadata", ignored)) return detail::index_dcp_folder(path);
  if (fs::is_directory(path / "latest", ignored)) return index_of(path / "latest", weights_only);
  return detail::index_safetensors_folder(path, weights_only);
}

const StoredTensor& tensor_named(const StoredTensors& stored, const std::string& name) {
  const auto found = stored.index.find(name);
  if (found == stored.index.end()) throw DataError("there is no tensor '" + name + "'");
  return stored.tensors[found->second];
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

/// Memory that a file of few bytes could ask for, by strides of 0.
void check_is_not_expanded(const StoredTensor& tensor, const StoredChunk& part, const Box& box) {
  constexpr double kLargest = 1 << 24;
  double elements = 1;
  for (const int64_t size : box.sizes) elements *= static_cast<double>(size);
  if (elements <= kLargest || elements <= static_cast<double>(part.bytes->size)) return;
  throw DataError("tensor '" + tensor.name + "' has more elements than its storage has bytes",
                  "save it without expand()");
}

at::Tensor read_box(const StoredTensor& tensor, const Box& box) {
  if (box.is_empty()) return at::empty(box.sizes, at::dtype(tensor.dtype));
  at::Tensor whole;
  for (const StoredChunk& chunk : tensor.chunks) {
    const Box both = detail::intersection(box, {chunk.offsets, chunk.sizes});
    if (both.is_empty()) continue;
    check_is_not_expanded(tensor, chunk, both);
    const at::Tensor part = detail::read_part(tensor, chunk, both);
    if (both.sizes == box.sizes) return part.contiguous();
    if (!whole.defined()) whole = at::empty(box.sizes, at::dtype(tensor.dtype));
    at::Tensor target = whole;
    for (size_t d = 0; d < box.sizes.size(); ++d) {
      target =
          target.narrow(static_cast<int64_t>(d), both.offsets[d] - box.offsets[d], both.sizes[d]);
    }
    target.copy_(part);
  }
  return whole;
}

void read_through(const StoredBytes& bytes) {
  ContentReader reader(bytes.path, bytes.where);
  std::vector<char> piece(1 << 20);
  uint64_t read = 0;
  while (const size_t size = reader.read_some(piece.data(), piece.size())) read += size;
  if (read != bytes.size)
    reader.fail(read, "expected " + std::to_string(bytes.size) + " bytes of content");
  reader.expect_end();
}

}  // namespace

at::Tensor detail::read_part(const TensorInfo& tensor, const StoredChunk& chunk, const Box& box) {
  int64_t first = chunk.first;
  int64_t last = 0;
  for (size_t d = 0; d < box.sizes.size(); ++d) {
    first += (box.offsets[d] - chunk.offsets[d]) * chunk.strides[d];
    last += (box.sizes[d] - 1) * chunk.strides[d];
  }
  const uint64_t width = at::elementSize(tensor.dtype);
  const std::string what = "tensor '" + tensor.name + "'";
  const at::Tensor bytes = read_storage(*chunk.bytes, first * width, (last + 1) * width, what);
  if (tensor.dtype == at::kBool && bytes.gt(1).any().item<bool>())
    throw DataError(chunk.bytes->path.string() + ": " + what +
                    " has a byte other than 0 or 1 for a boolean: the file is damaged");
  return resolved(
      chunk,
      at::empty({0}, at::dtype(tensor.dtype)).set_(bytes.storage(), 0, box.sizes, chunk.strides));
}

at::Tensor detail::resolved(const StoredChunk& chunk, const at::Tensor& stored) {
  const at::Tensor conjugated = chunk.conj ? stored.conj_physical() : stored;
  return chunk.neg ? conjugated.neg() : conjugated;
}

TensorReader::TensorReader(const fs::path& path, bool weights_only) {
  StoredTensors stored = index_of(path, weights_only);
  for (size_t i = 0; i < stored.tensors.size(); ++i) {
    stored.infos.push_back(stored.tensors[i]);
    stored.index.emplace(stored.tensors[i].name, i);
  }
  stored_ = std::make_shared<const StoredTensors>(std::move(stored));
}

const std::string& TensorReader::format() const {
  return stored_->format;
}
const std::vector<TensorInfo>& TensorReader::tensors() const {
  return stored_->infos;
}
const std::map<std::string, PtFile::Value>& TensorReader::values() const {
  return stored_->values;
}
const std::map<std::string, std::string>& TensorReader::metadata() const {
  return stored_->metadata;
}

at::Tensor TensorReader::read(const std::string& name) const {
  const StoredTensor& tensor = tensor_named(*stored_, name);
  return read_box(tensor, {std::vector<int64_t>(tensor.shape.size()), tensor.shape});
}

at::Tensor TensorReader::read(const std::string& name, at::IntArrayRef offsets,
                              at::IntArrayRef sizes) const {
  const StoredTensor& tensor = tensor_named(*stored_, name);
  if (!detail::is_within(offsets, sizes, tensor.shape))
    throw UsageError("a box " + c10::str(sizes) + " at " + c10::str(offsets) + " of tensor '" +
                     name + "', whose shape is " + c10::str(at::IntArrayRef(tensor.shape)));
  return read_box(tensor, {offsets.vec(), sizes.vec()});
}

std::vector<std::pair<std::string, std::string>> TensorReader::damage() const {
  std::map<const StoredBytes*, std::string> found;  // Tied tensors share their bytes.
  std::vector<std::pair<std::string, std::string>> damaged;
  for (const StoredTensor& tensor : stored_->tensors) {
    for (const StoredChunk& chunk : tensor.chunks) {
      const auto [place, is_new] = found.emplace(chunk.bytes.get(), "");
      try {
        if (is_new) read_through(*chunk.bytes);
      } catch (const Error& error) {
        place->second = error.what();
      }
      if (!place->second.empty()) damaged.emplace_back(tensor.name, place->second);
    }
  }
  return damaged;
}

}  // namespace lockstep
