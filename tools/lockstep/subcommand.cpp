#include "subcommand.h"

#include "entry.h"
#include "library.h"
#include "lockstep/base/heap.h"
#include "lockstep/launch/omp_waiting.h"
#include "unpack_ahead.h"

namespace lockstep::tool {
namespace {

constexpr size_t kLoadedLibTorch = 64 << 20;  ///< 42 MB are allocated by its loading.

}  // namespace

int run_from_library(const std::vector<std::string>& words) {
  std::vector<std::string> all = {"lockstep"};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> argv;
  for (auto& word : all) argv.push_back(word.data());
  argv.push_back(nullptr);
  launch::choose_omp_waiting();  // Before there is a thread of ours to be taken for others' work.
  grow_heap_in_huge_pages(kLoadedLibTorch);
  if (words[0] == "bench") {
    auto* bench =
        reinterpret_cast<decltype(&lockstep_bench_main)>(bench_symbol("lockstep_bench_main"));
    return bench(static_cast<int>(all.size()), argv.data());
  }
  UnpackAhead ahead(words);
  auto* run = reinterpret_cast<decltype(&lockstep_cli_main)>(library_symbol("lockstep_cli_main"));
  auto* offer = reinterpret_cast<decltype(&lockstep_cli_offer_unpacked)>(
      library_symbol("lockstep_cli_offer_unpacked"));
  for (const auto& file : ahead.files()) offer(file.path.c_str(), file.content.get(), file.size);
  return run(static_cast<int>(all.size()), argv.data());
}

}  // namespace lockstep::tool
