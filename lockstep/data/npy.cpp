#include "lockstep/data/npy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/dtype_names.h"
#include "lockstep/data/tensor_bytes.h"
#include "lockstep/data/zip.h"

namespace lockstep {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr std::string_view kSuffix = ".npy";

constexpr uint32_t kLongestHeader = 10'000;  // numpy's own limit

/// The text of a Python dictionary with plain values, as JSON.
std::string as_json(const std::string& python) {
  std::string text;
  for (const char c : python) {
    if (c == ')' || c == '}') {  // A comma may stand before it.
      const size_t last = text.find_last_not_of(" \n");
      if (last != std::string::npos && text[last] == ',') text.erase(last);
    }
    if (c == 'L' && !text.empty() && std::isdigit(static_cast<unsigned char>(text.back())))
      continue;  // Python 2 wrote 3L.
    text += c == '\'' ? '"' : c == '(' ? '[' : c == ')' ? ']' : c;
  }
  for (const auto& [word, json] : {std::pair("True", "true"), std::pair("False", "false")}) {
    const size_t at = text.find(word);
    if (at != std::string::npos) text.replace(at, std::string_view(word).size(), json);
  }
  return text;
}

nlohmann::json parse_header(const ContentReader& file, uint64_t start, const std::string& text) {
  using Json = nlohmann::json;
  const Json header = Json::parse(as_json(text), nullptr, /*allow_exceptions=*/false);
  const auto is = [&](const char* key, bool (Json::*test)() const) {
    return header.contains(key) && (header[key].*test)();
  };
  const auto is_size = [](const Json& size) { return size.is_number_unsigned(); };
  if (!header.is_object() || header.size() != 3 || !is("descr", &Json::is_string) ||
      !is("fortran_order", &Json::is_boolean) || !is("shape", &Json::is_array) ||
      !std::all_of(header["shape"].begin(), header["shape"].end(), is_size)) {
    file.fail(start,
              "the npy header is " + text.substr(0, 100) +
                  "; expected {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)} with a "
                  "plain dtype and sizes below 2^64");
  }
  return header;
}

at::ScalarType dtype_of(const ContentReader& file, uint64_t offset, const std::string& descr) {
  if (!descr.empty() && std::string_view("<>|=").find(descr[0]) != std::string_view::npos) {
    if (const auto dtype = dtype_of_name(&DtypeNames::npy, descr.substr(1))) return *dtype;
  }
  file.fail(offset, "the npy header has the dtype '" + descr +
                        "'; expected a byte order and one of " + known_dtypes(&DtypeNames::npy));
}

std::endian order_of(const std::string& descr) {
  if (descr[0] == '>') return std::endian::big;
  return descr[0] == '<' ? std::endian::little : std::endian::native;
}

std::string read_header_text(ContentReader& file) {
  std::array<char, kMagic.size()> magic;
  file.read_exact(magic.data(), magic.size(), "the start of an npy file");
  if (std::string_view(magic.data(), magic.size()) != kMagic) {
    file.fail(0, "no npy file: it does not start with 93 'NUMPY'");
  }
  std::array<unsigned char, 2> version;
  file.read_exact(version.data(), version.size(), "the format's version");
  if (version[0] < 1 || version[0] > 3) {
    file.fail(kMagic.size(),
              "npy format version " + std::to_string(version[0]) + "; expected 1, 2 or 3");
  }
  uint32_t length = 0;
  file.read_exact(&length, version[0] == 1 ? 2 : 4, "the header's length");
  if (length > kLongestHeader) {
    file.fail(kMagic.size() + version.size(), "an npy header of " + std::to_string(length) +
                                                  " bytes; expected at most " +
                                                  std::to_string(kLongestHeader));
  }
  std::string text(length, '\0');
  file.read_exact(text.data(), text.size(), "the npy header");
  return text;
}

at::Tensor read_npy(ContentReader& file, const std::string& what) {
  const std::string text = read_header_text(file);
  const uint64_t header_start = file.offset() - text.size();
  const nlohmann::json header = parse_header(file, header_start, text);
  const std::string descr = header["descr"];
  const bool fortran_order = header["fortran_order"];
  std::vector<int64_t> shape = header["shape"];
  const at::ScalarType dtype = dtype_of(file, header_start, descr);
  // Fortran's order is C's order of the transposed array.
  if (fortran_order) std::reverse(shape.begin(), shape.end());
  at::Tensor tensor = read_tensor(file, dtype, shape, order_of(descr), what);
  file.expect_end();
  if (!fortran_order) return tensor;
  std::vector<int64_t> reversed;
  for (int64_t i = tensor.dim() - 1; i >= 0; --i) reversed.push_back(i);
  return tensor.permute(reversed).contiguous();
}

}  // namespace

at::Tensor load_npy(const std::filesystem::path& path) {
  ContentReader file(path);
  return read_npy(file, "the array");
}

StateDict load_npz(const std::filesystem::path& path) {
  const ZipArchive archive(path);
  StateDict tensors;
  for (const ZipMember& member : archive.members()) {
    ContentReader file(path, archive.place_of(member));
    std::string name = member.name;
    if (name.ends_with(kSuffix)) name.resize(name.size() - kSuffix.size());
    tensors.emplace_back(name, read_npy(file, "array '" + name + "'"));
  }
  return tensors;
}

}  // namespace lockstep
