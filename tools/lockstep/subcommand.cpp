#include "commands.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <span>

#include "library.h"
#include "lockstep/base/heap.h"
#include "lockstep/data/content_reader.h"
#include "lockstep/data/mnist_files.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/tool/cli.h"

namespace lockstep::tool {
namespace {

constexpr size_t kLoadedLibTorch = 64 << 20;  ///< 42 MB are allocated by its loading.

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

/// Four times the largest of the files.
constexpr uint64_t kMost = 200'000'000;

bool has(const Words& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// Of the data set of `train` and `eval` that name mnist or fashion-mnist and no --config.
std::vector<fs::path> packed_files(const Words& words) {
  const bool reads = !words.empty() && (words[0] == "train" || words[0] == "eval");
  if (!reads || has(words, "--help") || has(words, "-h") || value_of_flag(words, "--config"))
    return {};
  const MnistLike* source = mnist_like(value_of_flag(words, "--dataset").value_or(""));
  if (!source) return {};
  const auto found =
      find_mnist(data_dir_or_default(value_of_flag(words, "--data-dir").value_or("")), *source);
  if (!found.complete()) return {};
  std::vector<fs::path> packed;
  for (const auto& path : found.paths)
    if (path.extension() == ".gz") packed.push_back(path);
  return packed;
}

/// Of a gzip file that is not too large, the content, which lives as long as the process. Else
/// empty.
std::span<const std::byte> unpacked(const fs::path& path) {
  ContentReader reader(path);
  if (!reader.compressed()) return {};
  // The content's size ends the file.
  std::array<uint8_t, 4> end{};
  std::ifstream file(path, std::ios::binary);
  file.seekg(-static_cast<std::streamoff>(end.size()), std::ios::end);
  file.read(reinterpret_cast<char*>(end.data()), end.size());
  const size_t size = end[0] | end[1] << 8 | end[2] << 16 | size_t{end[3]} << 24;
  if (size > std::min(kMost, reader.remaining_limit())) return {};
  std::unique_ptr<std::byte[]> content(new std::byte[size]);
  reader.read_exact(content.get(), size, "the content");
  reader.expect_end();
  return {content.release(), size};
}

/// Those of the files that can be unpacked.
UnpackedFiles unpack(const std::vector<fs::path>& paths) {
  UnpackedFiles files;
  for (const auto& path : paths) {
    try {
      if (const auto content = unpacked(path); !content.empty()) files[path] = content;
    } catch (const std::exception&) {
      // Also no memory. Reading the file meets the same, and says it.
    }
  }
  return files;
}

}  // namespace

int run_from_library(const std::vector<std::string>& words) {
  launch::choose_omp_waiting();  // Before there is a thread of ours to be taken for others' work.
  grow_heap_in_huge_pages(kLoadedLibTorch);
  if (words[0] == "bench") {
    return library_function<decltype(lockstep_bench_main)>("liblockstep_bench.so",
                                                           "lockstep_bench_main")(words);
  }
  // While LibTorch is loaded, which takes longer. Ranks that are forks of this process then share
  // the content. Ranks that are executed (with CUDA or OMP_PROC_BIND, or under `lockstep run`) each
  // unpack for themselves.
  const auto paths = packed_files(words);
  auto ahead =
      std::async(paths.empty() ? std::launch::deferred : std::launch::async, unpack, paths);
  auto* run =
      library_function<decltype(lockstep_cli_main)>("liblockstep_cli.so", "lockstep_cli_main");
  return run(words, ahead.get());
}

}  // namespace lockstep::tool
