#include "lockstep/data/digits.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/base/hash.h"

namespace lockstep {
namespace digits_test {

constexpr size_t kPixels = kDigitSide * kDigitSide;
using Picture = std::array<uint8_t, kPixels>;

struct Sample {
  Picture pixels;
  int label;
};

Sample sample(uint64_t seed, uint64_t index) {
  Sample result;
  result.label = render_digit(seed, index, result.pixels.data());
  return result;
}

TEST(Digits, AreAFunctionOfSeedAndIndexAlone) {
  const Sample first = sample(0, 7);
  sample(3, 4);
  const Sample again = sample(0, 7);
  EXPECT_EQ(first.label, again.label);
  EXPECT_EQ(first.pixels, again.pixels);
  EXPECT_NE(sample(0, 8).pixels, first.pixels);
  EXPECT_NE(sample(1, 7).pixels, first.pixels);
}

// Saved weights and published accuracies are of these pictures: changing them is a change for
// users.
TEST(Digits, StayTheSameFromVersionToVersion) {
  std::string bytes;
  for (uint64_t i = 0; i < 1000; ++i) {
    const Sample one = sample(0, i);
    bytes.append(reinterpret_cast<const char*>(one.pixels.data()), kPixels);
    bytes += static_cast<char>(one.label);
  }
  EXPECT_EQ(md5_hex(bytes), "4300a006fc33d0462dc0f660efa9d667");
}

TEST(Digits, EveryClassIsAboutAsFrequent) {
  std::array<int, 10> counts{};
  for (uint64_t i = 0; i < 5000; ++i) ++counts.at(static_cast<size_t>(sample(0, i).label));
  // 500 are expected of each; the standard deviation is 21.
  for (const int count : counts) EXPECT_NEAR(count, 500, 110);
}

TEST(Digits, HaveInkOnAMostlyEmptyGround) {
  for (uint64_t i = 0; i < 500; ++i) {
    const Sample one = sample(0, i);
    int bright = 0;
    for (const uint8_t pixel : one.pixels) bright += pixel > 100;
    EXPECT_GE(bright, 8) << "sample " << i;
    EXPECT_LE(bright, 280) << "sample " << i;
  }
}

// A classifier by the nearest mean picture is the simplest learner there is: far better than
// chance, as the classes are distinct, and far from perfect, as no sample is like another.
TEST(Digits, ClassesAreDistinctButNotTrivial) {
  constexpr uint64_t kTrain = 3000;
  std::array<std::array<double, kPixels>, 10> means{};
  std::array<int, 10> counts{};
  for (uint64_t i = 0; i < kTrain; ++i) {
    const Sample one = sample(0, i);
    ++counts[static_cast<size_t>(one.label)];
    for (size_t p = 0; p < kPixels; ++p) means[static_cast<size_t>(one.label)][p] += one.pixels[p];
  }
  for (size_t c = 0; c < 10; ++c) {
    for (double& value : means[c]) value /= counts[c];
  }
  int right = 0;
  for (uint64_t i = kTrain; i < kTrain + 1000; ++i) {
    const Sample one = sample(0, i);
    std::array<double, 10> distance{};
    for (size_t c = 0; c < 10; ++c) {
      for (size_t p = 0; p < kPixels; ++p) {
        const double difference = one.pixels[p] - means[c][p];
        distance[c] += difference * difference;
      }
    }
    const auto nearest = std::min_element(distance.begin(), distance.end()) - distance.begin();
    right += nearest == one.label;
  }
  EXPECT_GT(right, 500);
  EXPECT_LT(right, 900);
}

}  // namespace digits_test
}  // namespace lockstep
