#include "unpack_ahead.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>

#include "lockstep/base/heap.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/mnist_files.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

/// What a flag is given, as "--flag value" or "--flag=value"; the last one counts.
std::optional<std::string> value_of(const Words& words, const std::string& flag) {
  std::optional<std::string> value;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == flag && i + 1 < words.size()) value = words[i + 1];
    if (words[i].starts_with(flag + "=")) value = words[i].substr(flag.size() + 1);
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

/// What gzip says at the file's end: the size of its last member, modulo 2^32.
uint32_t promised_size(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<unsigned char, 4> bytes{};
  file.seekg(-4, std::ios::end).read(reinterpret_cast<char*>(bytes.data()), bytes.size());
  return uint32_t{bytes[3]} << 24 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[1]} << 8 | bytes[0];
}

/// No file where it holds more, or less, than is promised.
std::optional<UnpackAhead::File> unpacked(const fs::path& path) {
  ContentReader reader(path);
  const size_t size = promised_size(path);
  if (!reader.compressed() || size > reader.remaining_limit()) return std::nullopt;
  UnpackAhead::File file{path.string(), std::unique_ptr<std::byte[]>(new std::byte[size]), size};
  prefer_huge_pages(file.content.get(), size);
  reader.read_exact(file.content.get(), size, "the content");
  reader.expect_end();
  return file;
}

}  // namespace

UnpackAhead::UnpackAhead(const Words& words) {
  auto paths = packed_files(words);
  if (paths.empty()) return;
  thread_ = std::thread([this, paths = std::move(paths)] {
    for (const auto& path : paths) {
      try {
        if (auto file = unpacked(path)) files_.push_back(std::move(*file));
      } catch (const std::exception&) {
        // Also no memory. Reading the file meets the same, and says it.
      }
    }
  });
}

UnpackAhead::~UnpackAhead() {
  if (thread_.joinable()) thread_.join();
}

const std::vector<UnpackAhead::File>& UnpackAhead::files() {
  if (thread_.joinable()) thread_.join();
  return files_;
}

}  // namespace lockstep::tool
