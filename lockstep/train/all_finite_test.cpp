#include "lockstep/train/all_finite.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <limits>

namespace lockstep {
namespace all_finite_test {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                     at::kComplexFloat};

TEST(AllFinite, FindsOneAmongMany) {
  for (const at::ScalarType type : kTypes) {
    for (const int64_t count : {1, 2, 7, 33, 1000, 200'001}) {
      const at::Tensor tensor = at::randn({count}, at::kFloat).to(type);
      EXPECT_TRUE(all_finite({tensor})) << type << " " << count;
      for (const double bad : {kNan, -kNan, kInfinity, -kInfinity}) {
        for (const int64_t place : {int64_t{0}, count / 2, count - 1}) {
          at::Tensor spoilt = tensor.clone();
          spoilt[place] = bad;
          EXPECT_FALSE(all_finite({at::ones({3}), spoilt, at::ones({5})}))
              << type << " " << count << " " << bad << " at " << place;
        }
      }
    }
  }
}

TEST(AllFinite, TheLargestAndTheSmallestAreFinite) {
  const auto some = [](double value, at::ScalarType type) { return at::full({40}, value, type); };
  using Float = std::numeric_limits<float>;
  EXPECT_TRUE(all_finite({some(Float::max(), at::kFloat), some(Float::lowest(), at::kFloat),
                          some(Float::denorm_min(), at::kFloat), some(0, at::kFloat),
                          some(std::numeric_limits<double>::max(), at::kDouble),
                          some(65504, at::kHalf), some(3.38e38, at::kBFloat16)}));
}

TEST(AllFinite, OfAnyLayout) {
  at::Tensor strided = at::ones({6, 4}).slice(1, 0, 4, 2);
  EXPECT_TRUE(all_finite({strided, at::Tensor(), at::empty({0})}));
  strided[5][1] = kNan;
  EXPECT_FALSE(all_finite({strided}));
  at::Tensor images = at::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(all_finite({images}));
  images[1][2][3][3] = kInfinity;
  EXPECT_FALSE(all_finite({images}));
  const at::Tensor index = at::tensor({1, 4}, at::kLong).unsqueeze(0);
  const auto rows = [&](double last) {
    return at::sparse_coo_tensor(index, at::tensor({1.0, last}), {9});
  };
  EXPECT_TRUE(all_finite({rows(2)}));
  EXPECT_FALSE(all_finite({rows(kNan)}));
  EXPECT_TRUE(
      all_finite({at::sparse_coo_tensor({9, 3}, at::kFloat), at::_efficientzerotensor({4})}));
}

}  // namespace all_finite_test
}  // namespace lockstep
