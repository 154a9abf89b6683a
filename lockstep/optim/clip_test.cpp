#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/optim/optim.h"

namespace lockstep {
namespace clip_test {

at::Tensor with_gradient(const at::Tensor& gradient) {
  at::Tensor parameter = at::zeros_like(gradient).requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

TEST(ClipGradNorm, ScalesToTheLimit) {
  const std::vector<at::Tensor> all{with_gradient(at::full({4}, 3.0)), at::zeros({2}),
                                    with_gradient(at::full({4, 4}, 2.0))};
  EXPECT_DOUBLE_EQ(clip_grad_norm(all, 1.0), 10.0);
  EXPECT_NEAR(all[0].grad()[0].item<double>(), 0.3, 1e-6);
  EXPECT_NEAR(clip_grad_norm(all, 100), 1.0, 1e-6);
}

TEST(ClipGradNorm, LeavesSmallGradientsAsTheyAre) {
  const auto parameter = with_gradient(at::linspace(-1, 1, 33));
  const at::Tensor before = parameter.grad().clone();
  clip_grad_norm({parameter}, 1e6);
  EXPECT_TRUE(at::equal(parameter.grad(), before));
}

TEST(ClipGradNorm, NothingToClip) {
  EXPECT_EQ(clip_grad_norm({at::zeros({3})}, 1), 0);
}

TEST(ClipGradNorm, ASparseGradientHasTheNormOfItsElements) {
  const at::Tensor rows = at::tensor({1, 3, 1}, at::kLong).view({1, 3});
  const at::Tensor sparse =
      at::sparse_coo_tensor(rows, at::arange(1, 7, at::kFloat).view({3, 2}), {4, 2});
  const auto a = with_gradient(at::linspace(-1, 1, 33)), b = with_gradient(at::linspace(-1, 1, 33));
  at::Tensor dense = at::zeros({4, 2}).requires_grad_(), table = at::zeros({4, 2}).requires_grad_();
  dense.mutable_grad() = sparse.to_dense();
  // Two parameters that were added up share the values of their gradients.
  at::Tensor other = at::zeros({4, 2}).requires_grad_(), plain = at::zeros({4, 2}).requires_grad_();
  table.mutable_grad() = sparse;
  other.mutable_grad() = at::sparse_coo_tensor(rows, sparse._values(), {4, 2});
  plain.mutable_grad() = sparse.to_dense();
  EXPECT_NEAR(clip_grad_norm({a, table, other}, 1.0), clip_grad_norm({b, dense, plain}, 1.0), 1e-5);
  EXPECT_TRUE(table.grad().is_sparse());
  EXPECT_TRUE(at::allclose(table.grad().to_dense(), dense.grad()));
  EXPECT_TRUE(at::allclose(other.grad().to_dense(), plain.grad()));
}

TEST(ClipGradNorm, SeveralDtypes) {
  const std::vector<at::Tensor> all{with_gradient(at::full({9}, 1.0, at::kDouble)),
                                    with_gradient(at::full({16}, 1.0))};
  EXPECT_NEAR(clip_grad_norm(all, 1), 5, 1e-6);
  EXPECT_NEAR(all[0].grad()[0].item<double>(), 0.2, 1e-6);
  EXPECT_NEAR(all[1].grad()[0].item<double>(), 0.2, 1e-6);
}

TEST(ClipGradNorm, ReportsWhatIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(clip_grad_norm({with_gradient(at::full({3}, infinity))}, 1)));
  EXPECT_TRUE(std::isnan(clip_grad_norm({with_gradient(at::full({3}, std::nanf("")))}, 1)));
}

}  // namespace clip_test
}  // namespace lockstep
