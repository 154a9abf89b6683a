#include "lockstep/train/loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lockstep {
namespace loss_test {

TEST(CountCorrect, IsThatOfTheValues) {
  const at::Tensor output = at::tensor({1.0F, 2.0F, 0.0F, 5.0F, 4.0F, 3.0F}).view({2, 3});
  const at::Tensor target = at::tensor({1, 2}, at::kLong);
  EXPECT_EQ(count_correct(output, target), 1);
  EXPECT_EQ(count_correct(output.t().contiguous().t(), target), 1);
}

// Their memory holds other values than they have, or there is none.
TEST(CountCorrect, TakesTensorsThatAreNegatedLazilyAndZerosWithoutMemory) {
  const at::Tensor output = at::tensor({1.0F, 2.0F, 0.0F, 5.0F, 4.0F, 3.0F}).view({2, 3});
  const at::Tensor target = at::tensor({1, 0}, at::kLong);
  EXPECT_EQ(count_correct(at::_neg_view(-output), target), 2);
  EXPECT_EQ(count_correct(output, at::_neg_view(-target)), 2);
  EXPECT_EQ(count_correct(at::_efficientzerotensor({2, 3}, at::kFloat), target), 1);
  EXPECT_EQ(count_correct(output, at::_efficientzerotensor({2}, at::kLong)), 1);
}

}  // namespace loss_test
}  // namespace lockstep
