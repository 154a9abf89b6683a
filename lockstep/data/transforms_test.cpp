#include "lockstep/data/transforms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/affine_grid_generator.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/full.h>
#include <ATen/ops/grid_sampler.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "tests/support/message_of.h"

namespace lockstep {
namespace transforms_test {

using test::message_of;
using ::testing::HasSubstr;

at::Tensor bytes(at::IntArrayRef shape) {
  return at::randint(256, shape, at::kByte);
}

/// The random source that a sample's transform at a place of a Compose draws from.
KeyedRandom random_of(uint64_t seed, uint64_t place, int64_t epoch, int64_t index) {
  return KeyedRandom(KeyedRandom(seed, place).next(), epoch, index);
}

/// torchvision's ToTensor and Normalize, operation by operation.
at::Tensor torchvision_normalize(const at::Tensor& images, const std::vector<double>& mean,
                                 const std::vector<double>& std) {
  const at::Tensor m = at::tensor(mean, at::kFloat).view({-1, 1, 1});
  const at::Tensor s = at::tensor(std, at::kFloat).view({-1, 1, 1});
  return images.to(at::kFloat).div(255).sub_(m).div_(s);
}

TEST(Normalize, HasTorchvisionsBitsForEveryByte) {
  const at::Tensor images = at::arange(256, at::kByte).view({1, 16, 16});
  EXPECT_TRUE(at::equal(Compose{normalize()}(images),
                        torchvision_normalize(images.unsqueeze(1), {0.1307}, {0.3081})));
  EXPECT_TRUE(at::equal(Compose{to_float()}(images), images.unsqueeze(1).to(at::kFloat).div(255)));
}

TEST(Normalize, HasOneMeanAChannelOrOneForAll) {
  const std::vector<double> mean{0.485, 0.456, 0.406};
  const std::vector<double> std{0.229, 0.224, 0.225};
  const at::Tensor images = bytes({9, 3, 7, 5});  // planes that are no multiple of 8
  EXPECT_TRUE(
      at::equal(Compose{normalize(mean, std)}(images), torchvision_normalize(images, mean, std)));
  EXPECT_TRUE(at::equal(Compose{normalize({0.5}, {0.25})}(images),
                        torchvision_normalize(images, {0.5}, {0.25})));
}

TEST(Normalize, TakesFloats) {
  const at::Tensor images = at::rand({4, 3, 9, 11});
  const at::Tensor mean = at::tensor({0.1, 0.2, 0.3}, at::kFloat).view({3, 1, 1});
  const at::Tensor std = at::tensor({0.3, 0.7, 0.9}, at::kFloat).view({3, 1, 1});
  EXPECT_TRUE(at::equal(Compose{normalize({0.1, 0.2, 0.3}, {0.3, 0.7, 0.9})}(images),
                        images.sub(mean).div(std)));
  EXPECT_TRUE(at::equal(Compose{to_float()}(images), images));
  // In two steps as torchvision does it, the bits are those of one.
  const at::Tensor raw = bytes({4, 28, 28});
  EXPECT_TRUE(at::equal(Compose({to_float(), normalize()})(raw), Compose{normalize()}(raw)));
}

TEST(Normalize, NamesWhatDoesNotFit) {
  EXPECT_THAT(message_of([] { normalize({0.1}, {0}); }), HasSubstr("std other than 0"));
  EXPECT_THAT(message_of([] { normalize({0.1, 0.2}, {1}); }), HasSubstr("2 means and 1"));
  EXPECT_THAT(message_of([] { normalize({}, {}); }), HasSubstr("0 means"));
  EXPECT_THAT(message_of([] { normalize({NAN}, {1}); }), HasSubstr("finite"));
  const auto with = [](const at::Tensor& batch) {
    return message_of([&] { Compose{normalize({0.1, 0.1}, {1, 1})}(batch); });
  };
  EXPECT_THAT(with(bytes({2, 3, 4, 4})), HasSubstr("uint8 [3, 4, 4], expected 2 channels"));
  EXPECT_THAT(with(bytes({2, 20})), HasSubstr("expected uint8 images [H, W] or [C, H, W]"));
  EXPECT_THAT(with(at::ones({2, 3, 4, 4}, at::kLong)), HasSubstr("expected uint8 or float32"));
}

TEST(Compose, ReshapesWithoutACopyOfItsOwn) {
  const at::Tensor images = bytes({5, 4, 6});
  EXPECT_EQ((Compose{normalize(), flatten()}.output({{4, 6}, at::kByte})),
            (SampleSpec{{24}, at::kFloat}));
  EXPECT_TRUE(at::equal(Compose({normalize(), flatten()})(images),
                        Compose{normalize()}(images).flatten(1)));
  EXPECT_TRUE(at::equal(Compose({flatten(), reshape({2, 12})})(images), images.view({5, 2, 12})));
  EXPECT_TRUE(at::equal(Compose({flatten(), reshape({2, 3, 4}), normalize()})(images),
                        Compose{normalize()}(images.view({5, 2, 3, 4}))));
  EXPECT_TRUE(at::equal(Compose()(images), images));
  EXPECT_THAT(message_of([&] {
                Compose{reshape({5, 5})}(images);
              }),
              HasSubstr("expected 25 elements"));
}

TEST(Compose, StepsOfAKindDrawDifferentNumbers) {
  const at::Tensor images = bytes({200, 6, 6});
  const at::Tensor once = Compose{random_horizontal_flip()}(images, 1, 0);
  const at::Tensor twice =
      Compose{random_horizontal_flip(), random_horizontal_flip()}(images, 1, 0);
  EXPECT_FALSE(at::equal(once, images));
  EXPECT_FALSE(at::equal(twice, images)) << "the second flip undid every first one";
}

TEST(Compose, RandomStepsDependOnSeedAndEpoch) {
  const at::Tensor images = bytes({50, 12, 12});
  const Compose transforms{random_crop({.padding = 3}), random_horizontal_flip(),
                           random_rotation()};
  EXPECT_TRUE(at::equal(transforms(images, 1, 2), transforms(images, 1, 2)));
  EXPECT_FALSE(at::equal(transforms(images, 1, 2), transforms(images, 2, 2)));
  EXPECT_FALSE(at::equal(transforms(images, 1, 2), transforms(images, 1, 3)));
}

TEST(BatchTransform, RunsAUsersFunction) {
  const at::Tensor images = bytes({5, 4, 6});
  const auto halves = batch_transform("halves", [](const at::Tensor& batch) {
    return batch.to(at::kFloat).flatten(1).narrow(1, 0, batch.size(1) * batch.size(2) / 2);
  });
  EXPECT_TRUE(
      at::equal(Compose{halves}(images), images.flatten(1).narrow(1, 0, 12).to(at::kFloat)));
  const auto sum =
      batch_transform("sum", [](const at::Tensor& batch) { return batch.sum().view({1}); });
  EXPECT_THAT(message_of([&] { Compose{sum}(images); }),
              HasSubstr("'sum' must return one row for each"));
}

TEST(RandomCrop, IsAPartOfThePaddedImageAtEachPositionEquallyOften) {
  // Every pixel has its own value, so a crop tells its position.
  const int64_t count = 9000;
  const at::Tensor image = at::arange(1, 13, at::kFloat).view({1, 3, 4});
  const at::Tensor images = image.expand({count, 3, 4}).contiguous();
  const RandomCropOptions options{.height = 3, .width = 2, .padding = 1, .fill = -1};
  const at::Tensor crops = Compose{random_crop(options)}(images, 11, 5);
  ASSERT_EQ(crops.sizes(), (std::vector<int64_t>{count, 3, 2}));
  const at::Tensor padded = at::constant_pad_nd(image[0], {1, 1, 1, 1}, -1);
  std::map<std::pair<int64_t, int64_t>, int64_t> positions;
  for (int64_t i = 0; i < count; ++i) {
    KeyedRandom random = random_of(11, 0, 5, i);
    const auto top = static_cast<int64_t>(random.below(3));
    const auto left = static_cast<int64_t>(random.below(5));
    ASSERT_TRUE(at::equal(crops[i], padded.narrow(0, top, 3).narrow(1, left, 2))) << i;
    ++positions[{top, left}];
  }
  ASSERT_EQ(positions.size(), 15U);
  double chi2 = 0;
  for (const auto& [position, times] : positions) chi2 += std::pow(times - 600.0, 2) / 600;
  EXPECT_LT(chi2, 36.1);  // the 0.999 quantile of chi-squared with 14 degrees of freedom
}

TEST(RandomCrop, WorksOnChannelsBytesAndLargePaddings) {
  for (at::ScalarType dtype : {at::kByte, at::kShort, at::kFloat, at::kDouble}) {
    const at::Tensor images = bytes({30, 3, 5, 4}).to(dtype);
    const RandomCropOptions options{.height = 2, .width = 3, .padding = 6, .fill = 7};
    const at::Tensor crops = Compose{random_crop(options)}(images, 3);
    const at::Tensor padded = at::constant_pad_nd(images, {6, 6, 6, 6}, 7);
    for (int64_t i = 0; i < 30; ++i) {
      KeyedRandom random = random_of(3, 0, 0, i);
      const auto top = static_cast<int64_t>(random.below(5 + 12 - 2 + 1));
      const auto left = static_cast<int64_t>(random.below(4 + 12 - 3 + 1));
      EXPECT_TRUE(at::equal(crops[i], padded[i].narrow(1, top, 2).narrow(2, left, 3))) << i;
    }
  }
}

TEST(RandomCrop, NamesWhatDoesNotFit) {
  const at::Tensor images = bytes({2, 8, 8});
  EXPECT_THAT(message_of([&] { Compose{random_crop({.height = 11, .padding = 1})}(images); }),
              HasSubstr("at least 11 x 8"));
  EXPECT_THAT(message_of([&] {
                Compose{random_crop({.padding = 1})}(bytes({2, 8}));
              }),
              HasSubstr("images [H, W] or [C, H, W]"));
  EXPECT_THAT(message_of([] { random_crop({.padding = -1}); }), HasSubstr("a padding of -1"));
}

TEST(RandomHorizontalFlip, MirrorsAsOftenAsTold) {
  for (at::ScalarType dtype : {at::kByte, at::kShort, at::kFloat, at::kDouble}) {
    const at::Tensor images = bytes({2000, 3, 2, 5}).to(dtype);
    const at::Tensor mirrored = at::flip(images, {3});
    EXPECT_TRUE(at::equal(Compose{random_horizontal_flip(1)}(images), mirrored));
    EXPECT_TRUE(at::equal(Compose{random_horizontal_flip(0)}(images), images));
    const at::Tensor some = Compose{random_horizontal_flip(0.3)}(images, 4);
    int64_t flips = 0;
    for (int64_t i = 0; i < images.size(0); ++i) {
      const bool flipped = random_of(4, 0, 0, i).uniform() < 0.3;
      flips += flipped;
      ASSERT_TRUE(at::equal(some[i], flipped ? mirrored[i] : images[i])) << i;
    }
    EXPECT_NEAR(flips, 600, 3.3 * std::sqrt(2000 * 0.3 * 0.7));  // 0.999 of a binomial
  }
  EXPECT_THAT(message_of([] { random_horizontal_flip(1.5); }), HasSubstr("from 0 to 1"));
}

/// What torchvision's rotate does to a float tensor [C, H, W]: a grid of source positions, sampled.
at::Tensor torchvision_rotate(const at::Tensor& image, double radians, int64_t interpolation,
                              double fill) {
  const int64_t height = image.size(1);
  const int64_t width = image.size(2);
  // The grid's unit is half an image, so the turn is stretched by the sides' ratio.
  const double ratio = static_cast<double>(height) / static_cast<double>(width);
  const at::Tensor theta = at::tensor({std::cos(radians), -std::sin(radians) * ratio, 0.0,
                                       std::sin(radians) / ratio, std::cos(radians), 0.0},
                                      at::kFloat)
                               .view({1, 2, 3});
  const at::Tensor grid = at::affine_grid_generator(theta, {1, 1, height, width}, false);
  const at::Tensor with_mask = at::cat({image, at::ones({1, height, width})}).unsqueeze(0);
  const at::Tensor sampled = at::grid_sampler(with_mask, grid, interpolation, 0, false)[0];
  const at::Tensor mask = sampled.narrow(0, image.size(0), 1);
  return sampled.narrow(0, 0, image.size(0)) + (1 - mask) * fill;
}

double angle_of(double degrees, uint64_t seed, int64_t index) {
  return random_of(seed, 0, 0, index).uniform(-degrees, degrees) * std::numbers::pi / 180;
}

TEST(RandomRotation, NearestIsTorchvisions) {
  const at::Tensor images = bytes({100, 2, 20, 27});
  const at::Tensor turned = Compose{random_rotation({.degrees = 180, .fill = 9})}(images, 6);
  int64_t differing = 0;
  for (int64_t i = 0; i < images.size(0); ++i) {
    const at::Tensor expected =
        torchvision_rotate(images[i].to(at::kFloat), angle_of(180, 6, i), 1, 9);
    differing += (turned[i].to(at::kFloat) != expected).sum().item<int64_t>();
  }
  // The grid goes through other roundings, so a position half-way between two pixels may fall to
  // either: 1 in 10,000 pixels at most.
  EXPECT_LE(differing, turned.numel() / 10000);
}

TEST(RandomRotation, BilinearIsTorchvisions) {
  const at::Tensor images = at::rand({50, 3, 17, 12});
  const RandomRotationOptions options{
      .degrees = 90, .interpolation = Interpolation::bilinear, .fill = 0.5};
  const at::Tensor turned = Compose{random_rotation(options)}(images, 8);
  for (int64_t i = 0; i < images.size(0); ++i) {
    const at::Tensor expected = torchvision_rotate(images[i], angle_of(90, 8, i), 0, 0.5);
    // Positions up to 17 pixels in float32 through other roundings: 17 * 2^-23 a few times over.
    EXPECT_LT((turned[i] - expected).abs().max().item<float>(), 2e-5F) << i;
  }
  const at::Tensor rounded = Compose{random_rotation(options)}(bytes({50, 17, 12}), 8);
  EXPECT_EQ(rounded.scalar_type(), at::kByte);
}

TEST(RandomRotation, ByNothingChangesNothing) {
  for (Interpolation interpolation : {Interpolation::nearest, Interpolation::bilinear}) {
    const at::Tensor images = bytes({5, 8, 9});
    const Compose transforms{random_rotation({.degrees = 0, .interpolation = interpolation})};
    EXPECT_TRUE(at::equal(transforms(images), images));
  }
}

TEST(RandomRotation, NamesWhatDoesNotFit) {
  EXPECT_THAT(message_of([] { random_rotation({.degrees = -1}); }), HasSubstr("not below 0"));
  EXPECT_THAT(message_of([] {
                Compose{random_rotation()}(at::ones({2, 3, 3}, at::kLong));
              }),
              HasSubstr("int64 [3, 3], expected uint8 or float32"));
}

}  // namespace transforms_test
}  // namespace lockstep
