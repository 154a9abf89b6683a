#include "lockstep/amp/precision.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace autocast_test {

at::ScalarType product_dtype() {
  const at::Tensor a = at::ones({2, 2});
  return at::mm(a, a).scalar_type();
}

TEST(Autocast, ComputesProductsInItsDtypeAndRestores) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    {
      const Autocast autocast(c10::kCPU, dtype);
      EXPECT_EQ(product_dtype(), dtype);
    }
    EXPECT_EQ(product_dtype(), at::kFloat);
  }
}

TEST(Autocast, KeepsLossesInFloat32) {
  const Autocast autocast(c10::kCPU, at::kBFloat16);
  const at::Tensor a = at::ones({2, 2});
  EXPECT_EQ(at::mse_loss(at::mm(a, a), a).scalar_type(), at::kFloat);
}

TEST(Autocast, NestsAndRestoresWhatWasThere) {
  const Autocast outer(c10::kCPU, at::kBFloat16);
  {
    const Autocast off(c10::kCPU, at::kFloat, /*enabled=*/false);
    EXPECT_EQ(product_dtype(), at::kFloat);
    {
      const Autocast inner(c10::kCPU, at::kHalf);
      EXPECT_EQ(product_dtype(), at::kHalf);
    }
    EXPECT_EQ(product_dtype(), at::kFloat);
  }
  EXPECT_EQ(product_dtype(), at::kBFloat16);
}

/// A product with a parameter that is changed after its first use shows which cast was used.
float first_of_product(const at::Tensor& weight) {
  return at::mm(at::ones({1, 1}), weight).item<float>();
}

TEST(Autocast, KeepsCastsOfParametersUntilTheOutermostEnds) {
  const at::Tensor weight = at::ones({1, 1}).requires_grad_();
  {
    const Autocast outer(c10::kCPU, at::kBFloat16);
    {
      const Autocast inner(c10::kCPU, at::kBFloat16);
      EXPECT_EQ(first_of_product(weight), 1);
    }
    weight.detach().fill_(2);
    EXPECT_EQ(first_of_product(weight), 1) << "the inner guard dropped the cast";
  }
  const Autocast next(c10::kCPU, at::kBFloat16);
  EXPECT_EQ(first_of_product(weight), 2) << "the outer guard kept the cast";
}

TEST(Autocast, RestoresAfterAnException) {
  EXPECT_THROW(
      {
        const Autocast autocast(c10::kCPU, at::kBFloat16);
        throw Error("out of forward");
      },
      Error);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Autocast, RefusesOtherDtypesAndDevices) {
  EXPECT_THROW(Autocast(c10::kCPU, at::kFloat), UsageError);
  EXPECT_THROW(Autocast(c10::DeviceType::Meta, at::kBFloat16), UsageError);
  EXPECT_EQ(product_dtype(), at::kFloat);
}

}  // namespace autocast_test
}  // namespace lockstep
