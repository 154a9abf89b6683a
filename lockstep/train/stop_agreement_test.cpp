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

}  // namespace stop_agreement_test
}  // namespace lockstep
