#include "lockstep/data/idx.h"

#include <ATen/ops/from_blob.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/data/content_reader.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace {

constexpr int kMostDimensions = 8;  // more than any data set has; PyTorch itself takes 64

std::vector<int64_t> read_shape(ContentReader& file) {
  std::array<unsigned char, 4> four;
  file.read_exact(four.data(), four.size(), "an IDX header");
  if (four[0] != 0 || four[1] != 0 || four[2] != 8 || four[3] < 1 || four[3] > kMostDimensions) {
    file.fail(0, "no IDX file of bytes; expected 00 00 08 and 1 to 8 dimensions",
              "images start with 00 00 08 03 and labels with 00 00 08 01");
  }
  std::vector<int64_t> shape(four[3]);
  for (int64_t& size : shape) {
    file.read_exact(four.data(), four.size(), "the header's sizes");
    for (const unsigned char byte : four) size = size << 8 | byte;
  }
  return shape;
}

at::Tensor read_elements(ContentReader& file, const std::vector<int64_t>& shape) {
  at::Tensor tensor = read_tensor(file, at::kByte, shape, std::endian::big, "the elements");
  file.expect_end();
  return tensor;
}

}  // namespace

at::Tensor load_idx(const std::filesystem::path& path) {
  ContentReader file(path);
  const auto shape = read_shape(file);
  return read_elements(file, shape);
}

at::Tensor load_idx(const std::filesystem::path& path, std::span<const std::byte> content) {
  ContentReader file(path, content);
  const auto shape = read_shape(file);
  const std::span<const std::byte> rest = content.subspan(file.offset());
  if (bytes_of_shape(at::kByte, shape) != rest.size()) return read_elements(file, shape);
  // TensorDataset's tensors are never written to.
  auto* elements = const_cast<std::byte*>(rest.data());
  return at::from_blob(elements, shape, at::kByte);
}

}  // namespace lockstep
