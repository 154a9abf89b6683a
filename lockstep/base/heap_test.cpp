#include "lockstep/base/heap.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/support/page_faults.h"

namespace lockstep {
namespace heap_test {

using test::in_another_process;
using test::page_faults_of_steps;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kOwnMalloc = true;
#else
constexpr bool kOwnMalloc = false;
#endif

class Heap : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kOwnMalloc) GTEST_SKIP() << "a sanitizer's malloc takes no such settings";
    if (const auto chosen = heap_chosen()) GTEST_SKIP() << *chosen << " is set";
  }
};

TEST_F(Heap, FreedMemoryIsKept) {
  constexpr int kFew = 1, kMany = 2, kRefused = 3;
  // The blocks have 23,000 pages.
  const auto faults = [] { return page_faults_of_steps() < 10'000 ? kFew : kMany; };
  EXPECT_EQ(in_another_process(faults), kMany) << "glibc keeps so much by itself";
  EXPECT_EQ(in_another_process([&] { return keep_freed_memory() ? faults() : kRefused; }), kFew);
}

TEST_F(Heap, TheUsersChoiceStays) {
  const char* const choices[][2] = {{"MALLOC_TRIM_THRESHOLD_", "100000"},
                                    {"MALLOC_MMAP_THRESHOLD_", "100000"},
                                    {"MALLOC_MMAP_MAX_", "5"},
                                    {"MALLOC_TOP_PAD_", "0"},
                                    {"GLIBC_TUNABLES", "glibc.malloc.trim_threshold=100000"}};
  for (const auto& [name, value] : choices) {
    const int ended = in_another_process([name = name, value = value] {
      setenv(name, value, 1);
      return heap_chosen() == name && !keep_freed_memory() ? 0 : 1;
    });
    EXPECT_EQ(ended, 0) << name;
  }
  EXPECT_EQ(in_another_process([] {
              setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0", 1);
              return heap_chosen() ? 1 : 0;
            }),
            0);
}

}  // namespace heap_test
}  // namespace lockstep
