#include "lockstep/base/duration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"

namespace lockstep {
namespace duration_test {

using std::chrono::milliseconds;

TEST(Duration, SecondsBecomeMilliseconds) {
  EXPECT_EQ(timeout_of_seconds(120), milliseconds(120'000));
  EXPECT_EQ(timeout_of_seconds(0.0015), milliseconds(2));
  EXPECT_EQ(timeout_of_seconds(0.001), milliseconds(1));
  EXPECT_EQ(timeout_of_seconds(1e6), milliseconds(kLongestTimeout));
}

TEST(Duration, WhatNoClockHoldsIsRefused) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double seconds :
       {0.0, -1.0, 0.0009, 1000000.001, 1e10, infinity, -infinity, double(NAN)}) {
    EXPECT_FALSE(timeout_of_seconds(seconds)) << seconds;
  }
}

TEST(Duration, TheLongestIsAnIntOfMillisecondsAndLiesBeforeTheEndOfTheClock) {
  EXPECT_LE(milliseconds(kLongestTimeout).count(), std::numeric_limits<int>::max());
  const auto now = std::chrono::steady_clock::now();
  EXPECT_GT(now + kLongestTimeout, now);
}

TEST(Duration, ABadTimeoutIsNamedWithTheBounds) {
  EXPECT_NO_THROW(check_timeout("wait", milliseconds(1)));
  EXPECT_NO_THROW(check_timeout("wait", kLongestTimeout));
  for (const auto time : {milliseconds(0), milliseconds(-1), milliseconds::max()}) {
    try {
      check_timeout("wait", time);
      ADD_FAILURE() << time.count();
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("wait: a time-out of " +
                                                   std::to_string(time.count()) + " ms"));
      EXPECT_THAT(error.what(), testing::HasSubstr("from 0.001 to 1000000 seconds"));
    }
  }
}

}  // namespace duration_test
}  // namespace lockstep
