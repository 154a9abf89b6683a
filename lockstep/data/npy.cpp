#include "lockstep/data/npy.h"

#include <array>
#include <bit>
#include <cctype>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/tensor_bytes.h"
#include "lockstep/data/zip.h"

namespace lockstep {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr std::string_view kSuffix = ".npy";

/// What the header, the text of a Python dictionary, says.
struct NpyHeader {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<uint64_t>> shape;
};

/// Parses the dictionary: the three keys with a string, a truth value and a tuple of whole numbers.
class HeaderParser {
 public:
  HeaderParser(const ContentReader& file, uint64_t start, std::string_view text)
      : file_(file), start_(start), text_(text) {}

  NpyHeader parse() {
    NpyHeader header;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr") {
        if (peek() != '\'' && peek() != '"') {
          fail("a structured dtype; expected a plain one such as '<f4'");
        }
        header.descr = string();
      } else if (key == "fortran_order") {
        header.fortran_order = truth();
      } else if (key == "shape") {
        header.shape = tuple();
      } else {
        fail("the key '" + key + "'; expected descr, fortran_order and shape");
      }
      if (!accept(',') && peek() != '}') fail("no ',' or '}' after a value");
    }
    if (position() != text_.size()) fail("more text after the dictionary");
    if (!header.descr || !header.fortran_order || !header.shape) {
      fail("a dictionary that lacks descr, fortran_order or shape");
    }
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& complaint) const {
    file_.fail(start_ + next_, "the npy header has " + complaint);
  }

  size_t position() {
    while (next_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[next_]))) ++next_;
    return next_;
  }

  char peek() { return position() < text_.size() ? text_[next_] : '\0'; }

  bool accept(char wanted) {
    if (peek() != wanted || next_ >= text_.size()) return false;
    ++next_;
    return true;
  }

  void expect(char wanted) {
    if (!accept(wanted)) fail("no " + std::string(1, wanted) + " where one was expected");
  }

  std::string string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail("no text in quotes where one was expected");
    const size_t end = text_.find(quote, next_ + 1);
    if (end == std::string_view::npos) fail("a text without its closing quote");
    std::string result(text_.substr(next_ + 1, end - next_ - 1));
    next_ = end + 1;
    return result;
  }

  bool truth() {
    position();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(next_).starts_with(word)) {
        next_ += word.size();
        return value;
      }
    }
    fail("neither True nor False for fortran_order");
  }

  std::vector<uint64_t> tuple() {
    std::vector<uint64_t> numbers;
    expect('(');
    while (!accept(')')) {
      numbers.push_back(whole_number());
      if (!accept(',') && peek() != ')') fail("no ',' or ')' in the shape");
    }
    return numbers;
  }

  uint64_t whole_number() {
    uint64_t value = 0;
    bool any = false;
    position();
    for (; next_ < text_.size() && text_[next_] >= '0' && text_[next_] <= '9'; ++next_) {
      any = true;
      if (__builtin_mul_overflow(value, uint64_t{10}, &value) ||
          __builtin_add_overflow(value, static_cast<uint64_t>(text_[next_] - '0'), &value)) {
        fail("a size in the shape that is too large");
      }
    }
    if (!any) fail("something other than whole numbers in the shape");
    if (next_ < text_.size() && text_[next_] == 'L') ++next_;  // Python 2 wrote 3L
    return value;
  }

  const ContentReader& file_;
  uint64_t start_;
  std::string_view text_;
  size_t next_ = 0;
};

struct NpyType {
  std::string_view name;  ///< descr without the byte order.
  at::ScalarType dtype;
};
constexpr std::array<NpyType, 14> kTypes{{{"b1", at::ScalarType::Bool},
                                          {"u1", at::ScalarType::Byte},
                                          {"u2", at::ScalarType::UInt16},
                                          {"u4", at::ScalarType::UInt32},
                                          {"u8", at::ScalarType::UInt64},
                                          {"i1", at::ScalarType::Char},
                                          {"i2", at::ScalarType::Short},
                                          {"i4", at::ScalarType::Int},
                                          {"i8", at::ScalarType::Long},
                                          {"f2", at::ScalarType::Half},
                                          {"f4", at::ScalarType::Float},
                                          {"f8", at::ScalarType::Double},
                                          {"c8", at::ScalarType::ComplexFloat},
                                          {"c16", at::ScalarType::ComplexDouble}}};

at::ScalarType dtype_of(const ContentReader& file, uint64_t offset, const std::string& descr) {
  if (!descr.empty() && std::string_view("<>|=").find(descr[0]) != std::string_view::npos) {
    for (const NpyType& type : kTypes) {
      if (std::string_view(descr).substr(1) == type.name) return type.dtype;
    }
  }
  file.fail(offset,
            "the npy header has the dtype '" + descr +
                "'; expected a number or boolean: b1, i1 to i8, u1 to u8, f2 to f8, c8, c16");
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
  std::array<unsigned char, 4> length_bytes{};
  file.read_exact(length_bytes.data(), version[0] == 1 ? 2 : 4, "the header's length");
  const uint32_t length = uint32_t{length_bytes[0]} | uint32_t{length_bytes[1]} << 8 |
                          uint32_t{length_bytes[2]} << 16 | uint32_t{length_bytes[3]} << 24;
  constexpr uint32_t kLongest = 1 << 20;  // numpy itself refuses more than 10,000
  if (length > kLongest) {
    file.fail(kMagic.size() + version.size(), "an npy header of " + std::to_string(length) +
                                                  " bytes; expected at most " +
                                                  std::to_string(kLongest));
  }
  std::string text(length, '\0');
  file.read_exact(text.data(), text.size(), "the npy header");
  return text;
}

at::Tensor read_npy(ContentReader& file, const std::string& what) {
  const std::string text = read_header_text(file);
  const uint64_t header_start = file.offset() - text.size();
  const NpyHeader header = HeaderParser(file, header_start, text).parse();
  const at::ScalarType dtype = dtype_of(file, header_start, *header.descr);
  std::vector<uint64_t> shape = *header.shape;
  // Fortran's order is C's order of the transposed array.
  if (*header.fortran_order) shape.assign(header.shape->rbegin(), header.shape->rend());
  at::Tensor tensor = read_tensor(file, dtype, shape, order_of(*header.descr), what);
  file.expect_end();
  if (!*header.fortran_order) return tensor;
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
    const auto file = archive.open(member);
    std::string name = member.name;
    if (name.ends_with(kSuffix)) name.resize(name.size() - kSuffix.size());
    tensors.emplace_back(name, read_npy(*file, "array '" + name + "'"));
  }
  return tensors;
}

}  // namespace lockstep
