#include "lockstep/base/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace lockstep {
namespace random_test {

TEST(KeyedRandom, SameKeysSameStreamOtherKeysAnother) {
  KeyedRandom a(1, 2, 3);
  KeyedRandom b(1, 2, 3);
  KeyedRandom c(1, 3, 2);
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    const uint64_t value = a.next();
    EXPECT_EQ(value, b.next());
    differs |= value != c.next();
  }
  EXPECT_TRUE(differs);
}

TEST(KeyedRandom, BelowIsUniform) {
  KeyedRandom random(7);
  std::vector<int> counts(10);
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) ++counts[random.below(10)];
  double chi2 = 0;
  for (int count : counts) chi2 += std::pow(count - kDraws / 10.0, 2) / (kDraws / 10.0);
  EXPECT_LT(chi2, 27.9);  // the 0.999 quantile of chi-squared with 9 degrees of freedom
}

TEST(KeyedRandom, NormalHasItsMoments) {
  KeyedRandom random(11);
  double sum = 0;
  double squares = 0;
  constexpr int kDraws = 100000;
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0, 5 / std::sqrt(kDraws));
  EXPECT_NEAR(squares / kDraws, 1, 5 * std::sqrt(2.0 / kDraws));
}

}  // namespace random_test
}  // namespace lockstep
