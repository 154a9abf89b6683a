#include "lockstep/comm/backends/shm/processors.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

namespace lockstep::shm {
namespace {

static_assert(sizeof(ProcessorSet) == sizeof(cpu_set_t));

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

ProcessorSet allowed_processors() {
  ProcessorSet words{};
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) std::memcpy(words.data(), &set, sizeof(set));
  return words;
}

bool has_own_processor(const std::vector<ProcessorSet>& ranks, size_t rank) {
  const auto& own = ranks[rank];
  const auto bound = std::count_if(ranks.begin(), ranks.end(),
                                   [&](const ProcessorSet& other) { return within(other, own); });
  return static_cast<size_t>(bound) <= count(own);
}

bool has_spare_processors(int ranks) {
  return 2 * static_cast<size_t>(ranks) <= count(allowed_processors());
}

}  // namespace lockstep::shm
