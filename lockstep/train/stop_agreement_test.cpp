#include "lockstep/train/stop_agreement.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <utility>
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

TEST_P(StopAgreements, ASlowRankIsNamed) {
  std::string told;
  test::run_group(3,
                  [&](ProcessGroup group) {
                    StopAgreement agreement(group, c10::kCPU, SlowRank(/*least_seconds=*/0));
                    for (int step = 0; step < 100; ++step)
                      agreement.after_step(0, group.rank() == 1 ? 0.020 : 0.010);
                    if (group.rank() == 0) told = agreement.told();
                  },
                  {.backend = GetParam()});
  EXPECT_TRUE(told.starts_with("rank 1 is slow")) << told;
}

TEST(StopAgreement, OneRankLooksAtEveryStep) {
  test::run_group(1, [](ProcessGroup group) {
    StopAgreement agreement(group, c10::kCPU);
    EXPECT_EQ(agreement.after_step(0), 0);
    EXPECT_EQ(agreement.after_step(SIGINT), SIGINT);
  });
}

/// Of steps of 0.1 s each: what there is to say within `seconds`, and after how many of them.
std::pair<std::string, double> news_within(double seconds, SlowRank& watch,
                                           const std::vector<double>& own_seconds) {
  for (double now = 0.1; now < seconds; now += 0.1)
    if (const auto text = watch.after(1, 0.1, own_seconds); !text.empty()) return {text, now};
  return {"", seconds};
}

TEST(SlowRanks, OneThatStaysSlowIsNamedOnce) {
  SlowRank watch;
  const std::vector<double> even{0.010, 0.011, 0.010}, slow{0.010, 0.030, 0.011};
  EXPECT_EQ(news_within(100, watch, even).first, "");
  const auto [text, seconds] = news_within(100, watch, slow);
  EXPECT_TRUE(text.starts_with("rank 1 is slow")) << text;
  EXPECT_GE(seconds, 10);
  EXPECT_LE(seconds, 11);
  EXPECT_EQ(news_within(100, watch, slow).first, "");
  EXPECT_EQ(news_within(100, watch, even).first, "");
  EXPECT_EQ(news_within(100, watch, slow).first, "");
  const std::string other = news_within(100, watch, {0.030, 0.010, 0.010}).first;
  EXPECT_TRUE(other.starts_with("rank 0 is slow")) << other;
}

TEST(SlowRanks, AShortRunSaysNothing) {
  SlowRank watch;
  EXPECT_EQ(news_within(9, watch, {0.010, 0.030}).first, "");
}

TEST(SlowRanks, WhatIsShortForALongRunIsNoNews) {
  SlowRank watch;
  EXPECT_EQ(news_within(1000, watch, {0.010, 0.010}).first, "");
  const auto [text, seconds] = news_within(1000, watch, {0.010, 0.030});
  EXPECT_NE(text, "");
  EXPECT_GT(seconds, 50);  // A twentieth of the time until then.
  EXPECT_LT(seconds, 55);
}

/// On a busy machine now this rank is slow, now that one.
TEST(SlowRanks, WhatChangesAllTheTimeIsNoNews) {
  SlowRank watch;
  for (int turn = 0; turn < 200; ++turn) {
    std::vector<double> own{0.010, 0.010};
    if (turn % 3 != 2) own[static_cast<size_t>(turn % 3)] = 0.030;
    EXPECT_EQ(news_within(3, watch, own).first, "");
  }
}

TEST(SlowRanks, OneThatIsSlowMostOfTheTimeIsNews) {
  SlowRank watch;
  std::string told;
  for (int turn = 0; turn < 100; ++turn)
    told += news_within(3, watch, {0.010, turn % 4 == 3 ? 0.010 : 0.030}).first;
  EXPECT_TRUE(told.starts_with("rank 1 is slow")) << told;
}

TEST(SlowRanks, WhatItCostsIsSaid) {
  SlowRank watch;
  EXPECT_EQ(
      watch.after(SlowRank::kLeastSteps, 11, {0.010, 0.0315}),
      "rank 1 is slow: its own part of a step takes 31.5 ms, that of the other ranks 10.0 ms, "
      "so each step waits 21.5 ms for it");
}

TEST(SlowRanks, APauseInAStepIsNoNews) {
  SlowRank watch(0);
  for (int step = 0; step < 100; ++step)
    EXPECT_EQ(watch.after(1, 0.1, {0.010, step % 10 == 0 ? 0.200 : 0.010}), "");
}

TEST(SlowRanks, SmallDifferencesAreNoNews) {
  SlowRank watch(0);
  EXPECT_EQ(news_within(20, watch, {0.100, 0.120}).first, "");    // Less than a quarter.
  EXPECT_EQ(news_within(20, watch, {0.0002, 0.0009}).first, "");  // Less than a millisecond.
  EXPECT_EQ(news_within(20, watch, {0.5}).first, "");
}

}  // namespace stop_agreement_test
}  // namespace lockstep
