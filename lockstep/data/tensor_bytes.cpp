#include "lockstep/data/tensor_bytes.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace lockstep {
namespace {

/// Reverses the bytes of each number. Complex elements are two numbers.
void swap_bytes(at::Tensor& tensor) {
  const size_t unit = at::elementSize(c10::toRealValueType(tensor.scalar_type()));
  if (unit == 1) return;
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  for (auto* end = bytes + tensor.nbytes(); bytes != end; bytes += unit) {
    std::reverse(bytes, bytes + unit);
  }
}

}  // namespace

std::optional<uint64_t> bytes_of_shape(at::ScalarType dtype, at::IntArrayRef shape) {
  constexpr size_t kMostDimensions = 64;  // PyTorch's limit
  auto product = static_cast<int64_t>(at::elementSize(dtype));
  bool possible = shape.size() <= kMostDimensions;
  for (const int64_t size : shape) {
    possible &= size >= 0 && !__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product);
  }
  if (!possible) return std::nullopt;
  return std::count(shape.begin(), shape.end(), 0) > 0 ? 0 : static_cast<uint64_t>(product);
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text.empty() ? "scalar" : text;
}

at::Tensor read_tensor(ContentReader& file, at::ScalarType dtype, at::IntArrayRef shape,
                       std::endian order, const std::string& what) {
  const uint64_t start = file.offset();
  const std::optional<uint64_t> bytes = bytes_of_shape(dtype, shape);
  if (!bytes || *bytes > file.remaining_limit()) {
    file.fail(start,
              "the header promises " + shape_text(shape) + " elements of " + c10::toString(dtype) +
                  " for " + what + " (" +
                  (bytes ? std::to_string(*bytes) : std::string("over 2^63")) +
                  " bytes), but at most " + std::to_string(file.remaining_limit()) +
                  " bytes follow: the file is truncated or its header damaged",
              "copy or download the file again");
  }
  at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(dtype));
  file.read_exact(tensor.mutable_data_ptr(), *bytes, what);
  if (order != std::endian::native) swap_bytes(tensor);
  if (dtype == at::kBool && tensor.view(at::kByte).gt(1).any().item<bool>())
    file.fail(start, what + " has a byte other than 0 or 1 for a boolean");
  return tensor;
}

}  // namespace lockstep
