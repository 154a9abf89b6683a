#include "lockstep/train/callbacks.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lockstep {
namespace callbacks_test {

Metrics with_loss(double loss) {
  return {loss, 0.5, 10};
}

TEST(EarlyStop, WaitsForAsManyEpochsAsItHasPatience) {
  EarlyStop stop(2);
  for (const double loss : {1.0, 0.5, 0.6}) stop.observe(with_loss(loss));
  EXPECT_FALSE(stop.wants_to_stop());
  stop.observe(with_loss(0.5));
  EXPECT_TRUE(stop.wants_to_stop());
}

TEST(EarlyStop, ALowerLossStartsTheCountAnew) {
  EarlyStop stop(2);
  for (const double loss : {1.0, 1.1, 0.9, 1.0}) stop.observe(with_loss(loss));
  EXPECT_FALSE(stop.wants_to_stop());
}

TEST(EarlyStop, NanIsNotLower) {
  EarlyStop stop(1);
  stop.observe(with_loss(1.0));
  stop.observe(with_loss(std::nan("")));
  EXPECT_TRUE(stop.wants_to_stop());
}

TEST(EarlyStop, GoesOnFromItsValues) {
  EarlyStop before(2);
  before.observe(with_loss(1.0));
  before.observe(with_loss(1.5));
  EarlyStop after(2);
  after.load_values(before.values());
  after.observe(with_loss(1.2));
  EXPECT_TRUE(after.wants_to_stop());
}

}  // namespace callbacks_test
}  // namespace lockstep
