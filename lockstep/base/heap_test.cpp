#include "lockstep/base/heap.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/support/page_faults.h"

namespace lockstep {
namespace heap_test {

using test::in_another_process;
using test::page_faults_of_small_blocks;
using test::page_faults_of_steps;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kOwnMalloc = true;
#else
constexpr bool kOwnMalloc = false;
#endif

std::string huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  return line.empty() ? "[never]" : line;
}

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

TEST_F(Heap, GrowsInHugePages) {
  if (huge_pages().find("[never]") != std::string::npos) GTEST_SKIP() << "no huge pages here";
  constexpr int kFew = 1, kMany = 2, kRefused = 3;
  // 32 MB have 8,000 pages, or 16 huge ones.
  const auto faults = [] { return page_faults_of_small_blocks(32 << 20) < 2'000 ? kFew : kMany; };
  EXPECT_EQ(in_another_process(faults), kMany) << "glibc asks for huge pages by itself";
  EXPECT_EQ(
      in_another_process([&] { return grow_heap_in_huge_pages(64 << 20) ? faults() : kRefused; }),
      kFew);
}

TEST_F(Heap, WhatWasFreedOfTheHugePagesIsKept) {
  EXPECT_EQ(in_another_process([] {
              if (!grow_heap_in_huge_pages(64 << 20)) return 1;
              page_faults_of_small_blocks(32 << 20);
              return page_faults_of_small_blocks(32 << 20) < 100 ? 0 : 2;
            }),
            0);
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
      return heap_chosen() == name && !keep_freed_memory() && !grow_heap_in_huge_pages(64 << 20)
                 ? 0
                 : 1;
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
