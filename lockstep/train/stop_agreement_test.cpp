#include "lockstep/train/stop_agreement.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <vector>

#include "tests/support/run_group.h"

namespace lockstep {
namespace stop_agreement_test {

class StopAgreements : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, StopAgreements, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

/// However short the steps before it were: those after it may take seconds each.
TEST_P(StopAgreements, ASignalWaitsForFewStepsAndEndsAllRanksAtTheSameOne) {
  constexpr int64_t kSignalled = 3000;
  std::vector<int64_t> ends(3);
  test::run_group(3,
                  [&](ProcessGroup group) {
                    StopAgreement agreement(group, c10::kCPU);
                    int64_t step = 0;
                    int agreed = 0;
                    while (agreed == 0 && step < 2 * kSignalled) {
                      ++step;
                      const bool mine = group.rank() == 1 && step >= kSignalled;
                      agreed = agreement.after_step(mine ? SIGTERM : 0);
                    }
                    EXPECT_EQ(agreed, SIGTERM);
                    ends[static_cast<size_t>(group.rank())] = step;
                  },
                  {.backend = GetParam()});
  EXPECT_GE(ends[0], kSignalled);
  EXPECT_LE(ends[0], kSignalled + StopAgreement::kMostSteps);
  EXPECT_EQ(ends, std::vector<int64_t>(3, ends[0]));
}

TEST_P(StopAgreements, ASlowRankIsNamedWithinTwentySteps) {
  constexpr int kSlowFrom = 1000;
  std::vector<int> news;
  std::string told;
  test::run_group(3,
                  [&](ProcessGroup group) {
                    StopAgreement agreement(group, c10::kCPU);
                    for (int step = 1; step <= kSlowFrom + 100; ++step) {
                      const bool slow = group.rank() == 1 && step > kSlowFrom;
                      agreement.after_step(0, slow ? 0.020 : 0.010);
                      if (group.rank() != 0 || agreement.told() == told) continue;
                      told = agreement.told();
                      news.push_back(step - kSlowFrom);
                    }
                  },
                  {.backend = GetParam()});
  ASSERT_EQ(news.size(), 1U) << told;
  EXPECT_GT(news[0], 0);
  EXPECT_LE(news[0], 20);
  EXPECT_TRUE(told.starts_with("rank 1 is slow")) << told;
}

TEST(StopAgreement, OneRankLooksAtEveryStep) {
  test::run_group(1, [](ProcessGroup group) {
    StopAgreement agreement(group, c10::kCPU);
    EXPECT_EQ(agreement.after_step(0), 0);
    EXPECT_EQ(agreement.after_step(SIGINT), SIGINT);
  });
}

/// After how many steps of these times there is news; 0: none within twelve looks.
int64_t steps_to_news(SlowRank& watch, const std::vector<double>& own_seconds) {
  for (int64_t step = 1; step <= 12 * SlowRank::kLeastSteps; ++step)
    if (!watch.after(1, own_seconds).empty()) return step;
  return 0;
}

TEST(SlowRanks, OneIsNamedOnceAndToldWhenItIsOver) {
  SlowRank watch;
  const std::vector<double> even{0.010, 0.011, 0.010}, slow{0.010, 0.030, 0.011};
  EXPECT_EQ(steps_to_news(watch, even), 0);
  for (int i = 0; i < 3; ++i) watch.after(1, even);
  const int64_t steps = steps_to_news(watch, slow);
  EXPECT_GT(steps, 0);
  EXPECT_LE(steps, 20);
  EXPECT_EQ(steps_to_news(watch, slow), 0);
  EXPECT_GT(steps_to_news(watch, {0.030, 0.010, 0.010}), 0);  // Another one.
  EXPECT_GT(steps_to_news(watch, even), 0);
  EXPECT_EQ(steps_to_news(watch, even), 0);
}

TEST(SlowRanks, ChangesOfMindBecomeRare) {
  SlowRank watch;
  int told = 0;
  for (int step = 0; step < 200 * SlowRank::kLeastSteps; ++step) {
    const bool is_slow = step / SlowRank::kLeastSteps % 2 == 0;
    if (!watch.after(1, {0.010, is_slow ? 0.030 : 0.010}).empty()) ++told;
  }
  EXPECT_EQ(told, 2);
  EXPECT_GT(steps_to_news(watch, {0.010, 0.030}), 0);
}

TEST(SlowRanks, WhatItCostsIsSaid) {
  SlowRank watch;
  EXPECT_EQ(
      watch.after(SlowRank::kLeastSteps, {0.010, 0.0315}),
      "rank 1 is slow: its own part of a step takes 31.5 ms, that of the other ranks 10.0 ms, "
      "so each step waits 21.5 ms for it");
}

TEST(SlowRanks, APauseInAStepIsNoNews) {
  SlowRank watch;
  for (int step = 0; step < 100; ++step)
    EXPECT_EQ(watch.after(1, {0.010, step % 10 == 0 ? 0.200 : 0.010}), "");
}

TEST(SlowRanks, SmallDifferencesAreNoNews) {
  SlowRank watch;
  EXPECT_EQ(steps_to_news(watch, {0.100, 0.120}), 0);    // Less than a quarter.
  EXPECT_EQ(steps_to_news(watch, {0.0002, 0.0009}), 0);  // Less than a millisecond.
  EXPECT_EQ(steps_to_news(watch, {0.5}), 0);
}

}  // namespace stop_agreement_test
}  // namespace lockstep
