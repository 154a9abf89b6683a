#include "lockstep/data/idx.h"

#include <ATen/ops/from_blob.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "lockstep/data/content_reader.h"
#include "lockstep/data/tensor_bytes.h"

namespace lockstep {
namespace {

constexpr int kMostDimensions = 8;  // more than any data set has; PyTorch itself takes 64

at::ScalarType dtype_of(const ContentReader& file, const std::array<unsigned char, 4>& magic) {
  if (magic[0] == 0 && magic[1] == 0) {
    switch (magic[2]) {
      case 0x08:
        return at::kByte;
      case 0x09:
        return at::kChar;
      case 0x0B:
        return at::kShort;
      case 0x0C:
        return at::kInt;
      case 0x0D:
        return at::kFloat;
      case 0x0E:
        return at::kDouble;
      default:
        break;
    }
  }
  char found[16];
  std::snprintf(found, sizeof found, "%02x %02x %02x %02x", magic[0], magic[1], magic[2], magic[3]);
  file.fail(
      0,
      std::string("no IDX file: it starts with ") + found +
          "; expected 00 00, a type of 08, 09, 0b, 0c, 0d or 0e, and the number of dimensions",
      "images start with 00 00 08 03 and labels with 00 00 08 01");
}

std::vector<uint64_t> read_shape(ContentReader& file, int dimensions) {
  std::vector<uint64_t> shape;
  for (int i = 0; i < dimensions; ++i) {
    std::array<unsigned char, 4> size;
    file.read_exact(size.data(), size.size(), "the header's sizes");
    shape.push_back(uint32_t{size[0]} << 24 | uint32_t{size[1]} << 16 | uint32_t{size[2]} << 8 |
                    uint32_t{size[3]});
  }
  return shape;
}

struct Header {
  at::ScalarType dtype;
  std::vector<uint64_t> shape;
};

Header read_header(ContentReader& file) {
  std::array<unsigned char, 4> magic;
  file.read_exact(magic.data(), magic.size(), "an IDX header");
  const at::ScalarType dtype = dtype_of(file, magic);
  if (magic[3] < 1 || magic[3] > kMostDimensions) {
    file.fail(3, std::to_string(magic[3]) + " dimensions; expected 1 to " +
                     std::to_string(kMostDimensions));
  }
  return {dtype, read_shape(file, magic[3])};
}

at::Tensor read_elements(ContentReader& file, const Header& header) {
  at::Tensor tensor =
      read_tensor(file, header.dtype, header.shape, std::endian::big, "the elements");
  file.expect_end();
  return tensor;
}

}  // namespace

at::Tensor load_idx(const std::filesystem::path& path) {
  ContentReader file(path);
  const Header header = read_header(file);
  return read_elements(file, header);
}

at::Tensor load_idx(const std::filesystem::path& path, std::span<const std::byte> content) {
  ContentReader file(path, content);
  const Header header = read_header(file);
  const std::span<const std::byte> rest = content.subspan(file.offset());
  if (at::elementSize(header.dtype) != 1 ||
      bytes_of_shape(header.dtype, header.shape) != rest.size()) {
    return read_elements(file, header);
  }
  // TensorDataset's tensors are never written to.
  auto* elements = const_cast<std::byte*>(rest.data());
  return at::from_blob(elements, std::vector<int64_t>(header.shape.begin(), header.shape.end()),
                       at::TensorOptions().dtype(header.dtype));
}

}  // namespace lockstep
