#include "unpack_ahead.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>

#include "lockstep/data/content_reader.h"
#include "lockstep/data/mnist_files.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

/// Four times the largest of the files.
constexpr uint64_t kMost = 200'000'000;

/// What a flag is given, as "--flag value" or "--flag=value"; the last one counts.
std::optional<std::string> value_of(const Words& words, const std::string& flag) {
  std::optional<std::string> value;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = with_dashes(words[i]);
    if (word == flag && i + 1 < words.size()) value = words[i + 1];
    if (word.starts_with(flag + "=")) value = word.substr(flag.size() + 1);
  }
  return value;
}

bool has(const Words& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::vector<fs::path> packed_files(const Words& words) {
  const bool reads = !words.empty() && (words[0] == "train" || words[0] == "eval");
  if (!reads || has(words, "--help") || has(words, "-h") || value_of(words, "--config")) return {};
  const MnistLike* source = mnist_like(value_of(words, "--dataset").value_or(""));
  if (!source) return {};
  const auto found =
      find_mnist(data_dir_or_default(value_of(words, "--data-dir").value_or("")), *source);
  if (!found.complete()) return {};
  std::vector<fs::path> packed;
  for (const auto& path : found.paths)
    if (path.extension() == ".gz") packed.push_back(path);
  return packed;
}

/// The header of an IDX file of bytes: 00 00 08, the number of dimensions, and their sizes. Empty
/// for anything else.
std::vector<uint8_t> read_header(ContentReader& reader) {
  std::vector<uint8_t> header(4);
  reader.read_exact(header.data(), header.size(), "an IDX header");
  const bool of_bytes = header[0] == 0 && header[1] == 0 && header[2] == 8;
  const size_t dimensions = header[3];
  if (!of_bytes || (dimensions != 1 && dimensions != 3)) return {};
  header.resize(4 + 4 * dimensions);
  reader.read_exact(header.data() + 4, 4 * dimensions, "the header's sizes");
  return header;
}

/// How many elements the header promises; kMost for that many or more.
uint64_t elements_of(const std::vector<uint8_t>& header) {
  uint64_t elements = 1;
  for (size_t i = 4; i < header.size(); i += 4) {
    const uint64_t size = uint64_t{header[i]} << 24 | uint64_t{header[i + 1]} << 16 |
                          uint64_t{header[i + 2]} << 8 | uint64_t{header[i + 3]};
    elements = std::min(kMost, elements * size);
  }
  return elements;
}

/// No file where it holds more, or less, than its header promises, or is too large.
std::optional<UnpackAhead::File> unpacked(const fs::path& path) {
  ContentReader reader(path);
  if (!reader.compressed()) return std::nullopt;
  const auto header = read_header(reader);
  const uint64_t elements = elements_of(header);
  if (header.empty() || elements >= std::min(kMost, reader.remaining_limit())) return std::nullopt;
  const size_t size = header.size() + elements;
  UnpackAhead::File file{path.string(), std::unique_ptr<std::byte[]>(new std::byte[size]), size};
  std::memcpy(file.content.get(), header.data(), header.size());
  reader.read_exact(file.content.get() + header.size(), elements, "the elements");
  reader.expect_end();
  return file;
}

/// Those of the files that can be unpacked.
std::vector<UnpackAhead::File> unpack(const std::vector<fs::path>& paths) {
  std::vector<UnpackAhead::File> files;
  for (const auto& path : paths) {
    try {
      if (auto file = unpacked(path)) files.push_back(std::move(*file));
    } catch (const std::exception&) {
      // Also no memory. Reading the file meets the same, and says it.
    }
  }
  return files;
}

}  // namespace

UnpackAhead::UnpackAhead(const Words& words) {
  auto paths = packed_files(words);
  if (paths.empty()) return;
  thread_ = std::thread([this, paths = std::move(paths)] { files_ = unpack(paths); });
}

UnpackAhead::~UnpackAhead() {
  if (thread_.joinable()) thread_.join();
}

const std::vector<UnpackAhead::File>& UnpackAhead::files() {
  if (thread_.joinable()) thread_.join();
  return files_;
}

}  // namespace lockstep::tool
