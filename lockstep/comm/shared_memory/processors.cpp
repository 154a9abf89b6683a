#include "lockstep/comm/shared_memory/processors.h"

#include <algorithm>
#include <bit>
#include <thread>

#include "lockstep/base/cores.h"

namespace lockstep::shm {
namespace {

constexpr size_t kWordBits = 64;

size_t count(const ProcessorSet& set) {
  size_t sum = 0;
  for (const uint64_t word : set) sum += static_cast<size_t>(std::popcount(word));
  return sum > 0 ? sum : std::max(1U, std::thread::hardware_concurrency());
}

bool within(const ProcessorSet& inner, const ProcessorSet& outer) {
  if (outer == ProcessorSet{}) return true;
  for (size_t i = 0; i < inner.size(); ++i) {
    if ((inner[i] & ~outer[i]) != 0) return false;
  }
  return true;
}

}  // namespace

ProcessorSet own_processors() {
  ProcessorSet set{};
  for (const int processor : allowed_processors()) {
    const auto at = static_cast<size_t>(processor);
    if (at / kWordBits >= set.size()) return {};
    set[at / kWordBits] |= uint64_t{1} << (at % kWordBits);
  }
  return set;
}

bool has_own_processor(const std::vector<ProcessorSet>& ranks, size_t rank) {
  const auto& own = ranks[rank];
  const auto bound = std::count_if(ranks.begin(), ranks.end(),
                                   [&](const ProcessorSet& other) { return within(other, own); });
  return static_cast<size_t>(bound) <= count(own);
}

bool has_spare_processors(int ranks) {
  return 2 * static_cast<size_t>(ranks) <= allowed_processors().size();
}

}  // namespace lockstep::shm
