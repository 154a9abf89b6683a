#include "lockstep/data/named_sets.h"

#include <ATen/ops/empty.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

constexpr char32_t kCharacters = 0x110000;  ///< Of Unicode.
constexpr int64_t kAbsent = -1;

/// The code point at `at`, which moves on behind it. None where the bytes are no UTF-8 (RFC 3629).
std::optional<char32_t> next_character(std::string_view bytes, size_t& at) {
  const auto lead = static_cast<uint8_t>(bytes[at]);
  if (lead < 0x80) {
    ++at;
    return lead;
  }
  const size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || bytes.size() - at < size) return std::nullopt;
  char32_t character = lead & (0xFF >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    const auto byte = static_cast<uint8_t>(bytes[at + i]);
    if ((byte & 0xC0) != 0x80) return std::nullopt;
    character = character << 6 | (byte & 0x3F);
  }
  constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = character >= 0xD800 && character <= 0xDFFF;
  if (character < kSmallest[size] || character >= kCharacters || surrogate) return std::nullopt;
  at += size;
  return character;
}

/// The file's characters. Where it is no UTF-8, its bytes are.
std::vector<char32_t> characters_of(const fs::path& path, std::string_view bytes) {
  std::vector<char32_t> characters;
  characters.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size();) {
    const auto character = next_character(bytes, at);
    if (!character) {
      log_warning(path.string() + ", byte " + std::to_string(at) +
                  ": this is no UTF-8; each byte of the file counts as a character");
      characters.clear();
      for (const char byte : bytes) characters.push_back(static_cast<uint8_t>(byte));
      return characters;
    }
    characters.push_back(*character);
  }
  return characters;
}

std::string utf8(char32_t character) {
  if (character < 0x80) return {static_cast<char>(character)};
  std::string text;
  const int more = character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
  text += static_cast<char>((0xF0 << (3 - more) & 0xFF) | character >> (6 * more));
  for (int i = more - 1; i >= 0; --i) {
    text += static_cast<char>(0x80 | (character >> (6 * i) & 0x3F));
  }
  return text;
}

/// Windows over the tokens, `stride` apart, and the same one further on as targets. They share the
/// memory of `tokens`.
TensorDataset windows(const fs::path& path, const char* part, const at::Tensor& tokens,
                      const std::vector<std::string>& classes, int64_t context, int64_t stride) {
  const int64_t size = tokens.size(0);
  if (size <= context) {
    throw DataError(path.string() + ": the " + part + " part has " + with_thousands(size) +
                        " characters; expected at least " + with_thousands(context + 1) +
                        " for a context of " + with_thousands(context),
                    "give a longer text, or a model with a shorter context");
  }
  const int64_t count = (size - 1 - context) / stride + 1;
  const auto view = [&](int64_t first) {
    return tokens.as_strided({count, context}, {stride, 1}, tokens.storage_offset() + first);
  };
  return {.name = "text:" + path.string(),
          .data = view(0),
          .targets = view(1),
          .num_classes = static_cast<int64_t>(classes.size()),
          .classes = classes};
}

}  // namespace

DatasetSplits load_text(const fs::path& path, const DatasetOptions& options) {
  const int64_t context = options.context, stride = options.stride ? options.stride : context;
  if (context < 1 || stride < 1) {
    throw UsageError("data set text: a context of " + std::to_string(context) +
                     " and a stride of " + std::to_string(stride) + "; expected at least 1");
  }
  const double test_fraction = test_fraction_of(options);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw DataError("data set text:" + path.string() + ": there is no such file",
                    "--dataset text:PATH takes a text file");
  }
  const std::vector<char32_t> characters = characters_of(path, read_file(path));
  std::vector<int64_t> number(kCharacters, kAbsent);
  for (const char32_t character : characters) number[character] = 0;
  std::vector<std::string> classes;
  for (char32_t character = 0; character < kCharacters; ++character) {
    if (number[character] == kAbsent) continue;
    number[character] = static_cast<int64_t>(classes.size());
    classes.push_back(utf8(character));
  }
  const auto size = static_cast<int64_t>(characters.size());
  const at::Tensor tokens = at::empty({size}, at::kLong);
  auto* to = tokens.mutable_data_ptr<int64_t>();
  for (const char32_t character : characters) *to++ = number[character];
  const auto trained = static_cast<int64_t>(static_cast<double>(size) * (1 - test_fraction));
  return {windows(path, "training", tokens.slice(0, 0, trained), classes, context, stride),
          windows(path, "held-out", tokens.slice(0, trained), classes, context, stride)};
}

}  // namespace lockstep
