#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"

namespace lockstep {
namespace schedule_test {

TEST(Schedule, Constant) {
  EXPECT_EQ(scheduled_lr({}, 0.3, 0), 0.3);
  EXPECT_EQ(scheduled_lr({}, 0.3, 1'000'000), 0.3);
}

TEST(Schedule, WarmupReachesTheRateAtItsLastStep) {
  ScheduleOptions options;
  options.warmup_steps = 4;
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 0.8, 0), 0.2);
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 0.8, 2), 0.6);
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 0.8, 3), 0.8);
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 0.8, 4), 0.8);
}

TEST(Schedule, StepCountsFromTheEndOfTheWarmup) {
  const ScheduleOptions options{.name = "step", .warmup_steps = 2, .step_size = 3, .gamma = 0.5};
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 4), 1);
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 5), 0.5);
  EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 8), 0.25);
}

TEST(Schedule, CosineAndLinearReachAndKeepTheMinimum) {
  for (const std::string name : {"cosine", "linear"}) {
    const ScheduleOptions options{.name = name, .total_steps = 10, .min_lr = 0.125};
    EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 0), 1) << name;
    EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 5), 0.5625) << name;
    EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 10), 0.125) << name;
    EXPECT_DOUBLE_EQ(scheduled_lr(options, 1, 99), 0.125) << name;
    double last = 2;
    for (int64_t step = 0; step <= 10; ++step) {
      EXPECT_LT(scheduled_lr(options, 1, step), last) << name;
      last = scheduled_lr(options, 1, step);
    }
  }
}

TEST(Schedule, BadOptionsShowAtTheFirstStep) {
  EXPECT_THROW(scheduled_lr({.name = "cosin"}, 1, 0), UsageError);
  EXPECT_THROW(scheduled_lr({.name = "cosine"}, 1, 0), UsageError);
  EXPECT_THROW(scheduled_lr({.name = "linear", .warmup_steps = 9, .total_steps = 9}, 1, 0),
               UsageError);
  EXPECT_THROW(scheduled_lr({.name = "step"}, 1, 0), UsageError);
  EXPECT_THROW(scheduled_lr({.warmup_steps = -1}, 1, 0), UsageError);
}

}  // namespace schedule_test
}  // namespace lockstep
