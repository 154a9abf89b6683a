#include "tools/lockstep/train/placement.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/launch/variables.h"

namespace lockstep {
namespace placement_test {

using ::testing::HasSubstr;

TEST(Threads, CoresAreSharedByTheRanks) {
  EXPECT_EQ(choose_threads({}, {}, 8, 1).threads, 8);
  EXPECT_EQ(choose_threads({}, {}, 8, 3).threads, 2);
  EXPECT_EQ(choose_threads({}, {}, 8, 20).threads, 1);
  EXPECT_EQ(choose_threads({}, {}, 8, 1).reason, "8 cores, 1 rank; fewer for small models");
}

TEST(Threads, WhatIsAskedForWins) {
  EXPECT_EQ(choose_threads({}, 3, 8, 2).threads, 3);
  EXPECT_EQ(choose_threads({}, 3, 8, 2).reason, "OMP_NUM_THREADS");
  EXPECT_EQ(choose_threads(5, 3, 8, 2).threads, 5);
  EXPECT_EQ(choose_threads(5, 3, 8, 2).reason, "--threads");
}

class InEnvironment : public ::testing::Test {
 protected:
  InEnvironment() {
    ::unsetenv("OMP_NUM_THREADS");
    ::unsetenv(launch::kThreadsByLauncherVariable);
  }
  ~InEnvironment() override {
    ::unsetenv("OMP_NUM_THREADS");
    ::unsetenv(launch::kThreadsByLauncherVariable);
  }
  static JobEnvironment job(int rank, int size) {
    JobEnvironment job;
    job.launcher = "torchrun";
    job.rank = job.local_rank = rank;
    job.world_size = job.local_size = size;
    job.single_host = true;
    return job;
  }
};

TEST_F(InEnvironment, TorchrunsOneStands) {
  ::setenv("OMP_NUM_THREADS", "1", 1);
  EXPECT_EQ(choose_placement({}, "none", job(0, 1)).threads.threads, 1);
  ::setenv(launch::kThreadsByLauncherVariable, "1", 1);
  EXPECT_EQ(choose_placement({}, "none", job(0, 1)).threads.threads, usable_cores());
  EXPECT_FALSE(threads_are_asked_for({}));
  EXPECT_TRUE(threads_are_asked_for(2));
  ::unsetenv(launch::kThreadsByLauncherVariable);
  EXPECT_TRUE(threads_are_asked_for({}));
}

TEST_F(InEnvironment, NestedAndDamagedOmpValues) {
  ::setenv("OMP_NUM_THREADS", "3,2", 1);
  EXPECT_EQ(choose_placement({}, "none", job(0, 1)).threads.threads, 3);
  ::setenv("OMP_NUM_THREADS", "many", 1);
  EXPECT_EQ(choose_placement({}, "none", job(0, 1)).threads.threads, usable_cores());
}

TEST_F(InEnvironment, AnUnknownLayoutIsNotBound) {
  auto unknown = job(1, 4);
  unknown.local_rank = unknown.local_size = -1;
  unknown.single_host = false;
  const auto placement = choose_placement({}, "auto", unknown);
  EXPECT_TRUE(placement.binding.processors.empty());
  EXPECT_THAT(placement.binding.reason, HasSubstr("does not say"));
  EXPECT_EQ(placement.threads.threads, std::max(1, usable_cores() / 4));
}

TEST_F(InEnvironment, APlacementHoldsForThreadsThatComeLater) {
  const int before = at::get_num_threads();
  const int last = allowed_processors().back();
  std::thread([&] {
    Placement placement;
    placement.threads.threads = 3;
    placement.binding.processors = {last};
    apply(placement);
    EXPECT_EQ(at::get_num_threads(), 3);
    std::thread([&] { EXPECT_EQ(allowed_processors(), std::vector<int>{last}); }).join();
  }).join();
  at::set_num_threads(before);
}

TEST_F(InEnvironment, CoresByRank) {
  const int ranks = std::min(2, usable_cores());
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto binding = choose_placement({}, "core", job(rank, ranks)).binding;
    EXPECT_THAT(binding.reason, HasSubstr("core: "));
    all.insert(all.end(), binding.processors.begin(), binding.processors.end());
  }
  EXPECT_THAT(all, ::testing::UnorderedElementsAreArray(allowed_processors()));
  EXPECT_THROW(choose_placement({}, "core", job(0, 100'000)), UsageError);
}

TEST(RanksFor, ACoreEachAndAtMostEight) {
  EXPECT_EQ(ranks_for(0), 1);
  EXPECT_EQ(ranks_for(1), 1);
  EXPECT_EQ(ranks_for(2), 2);
  EXPECT_EQ(ranks_for(8), 8);
  EXPECT_EQ(ranks_for(12), 6);
  EXPECT_EQ(ranks_for(13), 6);
  EXPECT_EQ(ranks_for(64), 8);
}

}  // namespace placement_test
}  // namespace lockstep
