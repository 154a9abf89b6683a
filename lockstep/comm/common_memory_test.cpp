// common_empty: one memory for all ranks.
#include "lockstep/comm/process_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace common_memory_test {

using test::run_group;

class CommonMemory : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CommonMemory, ::testing::Values(1, 2, 3, 4));

TEST_P(CommonMemory, WhatOneRankWritesTheOthersRead) {
  run_group(GetParam(),
            [](ProcessGroup group) {
              const int64_t each = 5'000;  // No whole pages.
              at::Tensor memory = common_empty(group, each * group.size(), at::kFloat);
              ASSERT_EQ(memory.numel(), each * group.size());
              EXPECT_EQ(memory.sum().item<float>(), 0);
              group.barrier();
              memory.narrow(0, group.rank() * each, each).fill_(group.rank() + 1);
              group.barrier();
              for (int rank = 0; rank < group.size(); ++rank)
                EXPECT_TRUE(memory.narrow(0, rank * each, each).eq(rank + 1).all().item<bool>());
              group.barrier();
              // As any other tensor in a collective call.
              at::Tensor mine = memory.narrow(0, group.rank() * each, each);
              group.all_reduce(mine);
              const int sum = group.size() * (group.size() + 1) / 2;
              EXPECT_TRUE(mine.eq(sum).all().item<bool>());
            },
            {.backend = "shm"});
}

TEST(CommonMemoryElsewhere, IsUndefined) {
  run_group(
      2, [](ProcessGroup group) { EXPECT_FALSE(common_empty(group, 10, at::kFloat).defined()); });
}

TEST(CommonMemoryElsewhere, WrongUseIsAnError) {
  EXPECT_THROW(common_empty({}, 1, at::kFloat), UsageError);
  run_group(2,
            [](ProcessGroup group) {
              EXPECT_THROW(common_empty(group, -1, at::kFloat), UsageError);
              EXPECT_THROW(common_empty(group, 10 + group.rank(), at::kFloat), MismatchError);
              if (group.rank() == 0) {
                EXPECT_THROW(common_empty(group, 10, at::kFloat), MismatchError);
              } else {
                EXPECT_THROW(group.symmetric_empty(10, at::kFloat), MismatchError);
              }
              group.barrier();
            },
            {.backend = "shm"});
}

}  // namespace common_memory_test
}  // namespace lockstep
