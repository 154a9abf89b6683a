#include "lockstep/rpc/value_codec.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/rpc/value.h"

namespace lockstep::rpc::detail {
namespace value_codec_test {

using ::testing::HasSubstr;
using Random = std::mt19937_64;

constexpr MessageLimits kLimits{64 << 10, 8};

std::string encoded(const std::vector<at::IValue>& values, const MessageLimits& limits = kLimits) {
  std::string bytes;
  return encode_values(values, limits, bytes) ? bytes : "not plain";
}

std::string refusal(std::string_view bytes, int depth = kLimits.depth) {
  try {
    decode_values(bytes, depth);
  } catch (const DataError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ValueCodec, TensorsOwnTheirMemory) {
  const at::Tensor whole = at::arange(12, at::kFloat).view({3, 4});
  const auto values = decode_values(encoded({whole[1], at::empty({0, 5}), at::ones({2})}), 8);
  ASSERT_EQ(values.size(), 3);
  EXPECT_TRUE(at::equal(values[0].toTensor(), whole[1]));
  EXPECT_EQ(values[1].toTensor().sizes(), at::IntArrayRef({0, 5}));
  values[0].toTensor().zero_();
  EXPECT_EQ(values[2].toTensor().sum().item<float>(), 2);
  EXPECT_EQ(whole.sum().item<float>(), 66);
}

TEST(ValueCodec, APartOfALargeTensorTravelsAlone) {
  const at::Tensor large = at::zeros({1 << 20});
  EXPECT_LT(encoded({large.slice(0, 0, 10)}).size(), 200);
  EXPECT_EQ(encoded({large}), "not plain") << "more than the limit";
}

TEST(ValueCodec, SharedMemoryAndStridesAreNotPlain) {
  const at::Tensor whole = at::ones({3, 4});
  EXPECT_EQ(encoded({whole, whole[1]}), "not plain");
  const auto twice = decode_values(encoded({whole, whole}), 8);
  EXPECT_TRUE(twice[0].toTensor().is_same(twice[1].toTensor()));
  EXPECT_EQ(encoded({whole.t()}), "not plain");
  EXPECT_EQ(encoded({at::ones({1, 3}).expand({4, 3})}), "not plain");
}

TEST(ValueCodec, OtherKindsAndDeeperValuesAreNotPlain) {
  EXPECT_EQ(encoded({at::ones({2}, at::kComplexFloat).conj()}), "not plain");
  EXPECT_EQ(encoded({at::ones({2, 2}).to_sparse()}), "not plain");
  EXPECT_EQ(encoded({at::IValue::make_capsule(c10::make_intrusive<torch::CustomClassHolder>())}),
            "not plain");
  const at::IValue two_deep = make_tuple({make_tuple({1})});
  EXPECT_EQ(encoded({two_deep}, {1000, 1}), "not plain");
  EXPECT_NE(encoded({two_deep}, {1000, 2}), "not plain");
  EXPECT_THAT(refusal(encoded({two_deep}), 1), HasSubstr("deeper than the limit"));
}

TEST(ValueCodec, RefusesLyingCountsAndBounds) {
  const std::string bytes = encoded({7, 2.5, "text", make_tuple({true, {}}), at::ones({2, 3})});
  EXPECT_EQ(refusal(bytes), "accepted");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(refusal(bytes.substr(0, size)), "accepted") << size;
  }
  EXPECT_THAT(refusal(bytes + "x"), HasSubstr("bytes behind its end"));
  EXPECT_THAT(refusal(std::string("\xff\xff\xff\xff", 4)), HasSubstr("a count beyond the end"));
  EXPECT_THAT(refusal(std::string("\x01\0\0\0\x40", 5)), HasSubstr("an unknown kind"));
  std::string tensor = encoded({at::ones({1})});
  // Behind the count, the kind, the type, the flag and the dimensions: the size.
  tensor[8] = 2;
  EXPECT_THAT(refusal(tensor), HasSubstr("a length beyond the end"));
  tensor[15] = '\x7f';
  EXPECT_NE(refusal(tensor), "accepted");
}

at::IValue random_value(Random& random, int depth) {
  const auto below = [&](uint64_t limit) { return random() % limit; };
  switch (below(depth > 0 ? 9 : 7)) {
    case 0:
      return {};
    case 1:
      return static_cast<int64_t>(random());
    case 2:
      return std::bit_cast<double>(random());
    case 3:
      return below(2) == 1;
    case 4:
      return std::string(below(40), static_cast<char>(random()));
    case 5:
      return at::ones({static_cast<int64_t>(below(4))}).requires_grad_(below(2) == 1);
    case 6:
      return at::ones({2, 3}, at::kByte);
    default: {
      std::vector<at::IValue> parts;
      for (uint64_t left = below(6); left > 0; --left) {
        parts.push_back(random_value(random, depth - 1));
      }
      return make_tuple(std::move(parts));
    }
  }
}

void spoil(std::string& bytes, Random& random) {
  const auto place = [&] { return random() % bytes.size(); };
  switch (random() % 5) {
    case 0:
      bytes[place()] ^= static_cast<char>(1 << random() % 8);
      return;
    case 1:
      bytes.resize(place());
      return;
    case 2:
      bytes.insert(place(), 1 + random() % 20, static_cast<char>(random() % 9));
      return;
    case 3:
      for (size_t at = place(); at < bytes.size() && random() % 5 > 0; ++at) bytes[at] = '\xff';
      return;
    default:
      bytes[place()] = static_cast<char>(random());
      return;
  }
}

/// Reads the elements of tensors, so that a sanitizer sees those that lie elsewhere.
void touch(const at::IValue& value) {
  constexpr int64_t kFew = 1000;  // One with strides of 0 may have any number.
  if (value.isTensor() && value.toTensor().numel() < kFew) {
    static_cast<void>(value.toTensor().to(at::kByte).clone());
  }
}

TEST(ValueCodecFuzz, SpoiltBytesAreReadOrRefused) {
  const auto given = env_string("LOCKSTEP_FUZZ_SEED");
  const uint64_t seed = given ? std::stoull(*given) : std::random_device{}();
  std::printf("LOCKSTEP_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  SCOPED_TRACE(seed);
  Random random(seed);
  int64_t refused = 0, read = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::vector<at::IValue> values{random_value(random, 4), random_value(random, 2)};
    std::string bytes = encoded(values);
    ASSERT_NE(bytes, "not plain");
    for (uint64_t times = random() % 3; times > 0 && !bytes.empty(); --times) {
      spoil(bytes, random);
    }
    try {
      for (const auto& value : decode_values(bytes, kLimits.depth)) touch(value);
      ++read;
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_GT(read, 5'000);
  EXPECT_GT(refused, 2'000);
}

}  // namespace value_codec_test
}  // namespace lockstep::rpc::detail
