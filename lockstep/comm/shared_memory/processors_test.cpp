#include "lockstep/comm/shared_memory/processors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "lockstep/base/cores.h"

namespace lockstep::shm {
namespace processors_test {

ProcessorSet set_of(std::initializer_list<int> processors) {
  ProcessorSet set{};
  for (const int one : processors) set[static_cast<size_t>(one) / 64] |= 1ULL << (one % 64);
  return set;
}

TEST(Processors, AreThoseThatTheThreadMayRunOn) {
  std::thread([] {
    const int last = allowed_processors().back();
    set_allowed_processors({last});
    EXPECT_EQ(own_processors(), set_of({last}));
    EXPECT_FALSE(has_spare_processors(1));
  }).join();
}

TEST(Processors, ARankHasItsOwnWhereNoMoreAreBoundThanThereAre) {
  const ProcessorSet both = set_of({0, 1}), first = set_of({0}), second = set_of({1});
  EXPECT_TRUE(has_own_processor({both, both}, 0));
  EXPECT_FALSE(has_own_processor({both, both, both}, 2));
  EXPECT_TRUE(has_own_processor({first, second}, 1)) << "each bound to one of its own";
  EXPECT_FALSE(has_own_processor({first, first}, 0)) << "both bound to the same one";
  EXPECT_FALSE(has_own_processor({first, second, first, second}, 1));
  EXPECT_TRUE(has_own_processor({set_of({700, 1000}), set_of({3})}, 0));
}

TEST(Processors, WhereTheyAreNotKnownTheMachinesCount) {
  const auto all = static_cast<size_t>(std::max(1U, std::thread::hardware_concurrency()));
  EXPECT_TRUE(has_own_processor(std::vector<ProcessorSet>(all), 0));
  EXPECT_FALSE(has_own_processor(std::vector<ProcessorSet>(all + 1), 0));
}

}  // namespace processors_test
}  // namespace lockstep::shm
