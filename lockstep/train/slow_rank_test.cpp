#include "lockstep/train/slow_rank.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace slow_rank_test {

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

}  // namespace slow_rank_test
}  // namespace lockstep
