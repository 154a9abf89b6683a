#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <unordered_map>

#include "lockstep/base/error.h"

namespace lockstep {
namespace scatter_gather_test {

using ::testing::HasSubstr;

struct Sample {
  at::Tensor image;
  std::vector<at::Tensor> more;
  std::string note;
};

std::vector<c10::Device> cpus(size_t count) {
  return std::vector<c10::Device>(count, c10::kCPU);
}

}  // namespace scatter_gather_test

template <>
struct OutputTensors<scatter_gather_test::Sample> {
  template <class F>
  static void visit(scatter_gather_test::Sample& sample, F&& f) {
    visit_tensors(sample.image, f);
    visit_tensors(sample.more, f);
  }
};

namespace scatter_gather_test {

TEST(Scatter, CutsAsChunkDoes) {
  const at::Tensor x = at::arange(14).view({7, 2});
  for (const size_t devices : {1, 2, 3, 4, 5, 7, 9}) {
    const auto parts = scatter(x, cpus(devices));
    const auto expected = x.chunk(static_cast<int64_t>(devices));
    ASSERT_EQ(parts.size(), expected.size());
    for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(parts[i], expected[i]));
  }
}

TEST(Scatter, SharesMemoryOnTheTensorsDevice) {
  const at::Tensor x = at::zeros({4, 2});
  scatter(x, cpus(2))[1].fill_(3);
  EXPECT_EQ(x.sum().item<double>(), 12);
}

TEST(Scatter, AlongAnotherDimension) {
  const at::Tensor x = at::arange(12).view({2, 6});
  const auto parts = scatter(x, cpus(3), 1);
  EXPECT_EQ(parts[2].sizes(), at::IntArrayRef({2, 2}));
  EXPECT_TRUE(at::equal(gather(parts, c10::kCPU, 1), x));
}

TEST(Scatter, FindsTensorsInNestedValues) {
  const Sample sample{at::arange(4), {at::arange(8).view({4, 2})}, "both"};
  const auto value =
      std::make_tuple(sample, 7, std::map<std::string, at::Tensor>{{"y", at::ones({4})}});
  const auto parts = scatter(value, cpus(2));
  ASSERT_EQ(parts.size(), 2U);
  const auto& [second, number, named] = parts[1];
  EXPECT_TRUE(at::equal(second.image, at::tensor({2, 3}, at::kLong)));
  EXPECT_EQ(second.more[0].sizes(), at::IntArrayRef({2, 2}));
  EXPECT_EQ(second.note, "both");
  EXPECT_EQ(number, 7);
  EXPECT_EQ(named.at("y").numel(), 2);
  EXPECT_EQ(sample.image.numel(), 4) << "the value itself stays";

  const auto all = gather(parts, c10::kCPU);
  EXPECT_TRUE(at::equal(std::get<0>(all).more[0], sample.more[0]));
}

TEST(Scatter, ValuesWithoutTensorsAreCopied) {
  EXPECT_EQ(scatter(std::string("x"), cpus(3)), std::vector<std::string>(3, "x"));
  EXPECT_EQ(scatter(std::vector<int64_t>{1, 2}, cpus(2)).at(1), (std::vector<int64_t>{1, 2}));
}

TEST(Scatter, ScalarsGoEverywhere) {
  const auto parts = scatter(std::make_tuple(at::ones({3}), at::scalar_tensor(5)), cpus(4));
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(std::get<1>(parts[2]).item<double>(), 5);
}

TEST(Scatter, RowsThatDoNotFitAreRefused) {
  try {
    scatter(std::make_tuple(at::ones({8, 3}), at::ones({1, 3})), cpus(2));
    FAIL() << "rows would be lost";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[8, 3] gives 2 parts"));
    EXPECT_THAT(error.what(), HasSubstr("[1, 3] gives 1"));
    EXPECT_THAT(error.what(), HasSubstr("hint: "));
  }
}

TEST(Scatter, NeedsDevices) {
  EXPECT_THROW(scatter(at::ones({2}), {}), UsageError);
}

TEST(ScatterGather, PassGradients) {
  const at::Tensor x = at::arange(5, at::kFloat).requires_grad_();
  auto parts = scatter(x, cpus(2));
  parts[0] = parts[0] * 2;
  parts[1] = parts[1] * 3;
  gather(parts, c10::kCPU).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::tensor({2.F, 2.F, 2.F, 3.F, 3.F})));
}

TEST(Gather, ScalarsBecomeAVector) {
  const std::vector<at::Tensor> losses{at::scalar_tensor(1), at::scalar_tensor(2)};
  for (const int64_t dim : {0, 1})
    EXPECT_TRUE(at::equal(gather(losses, c10::kCPU, dim), at::tensor({1.F, 2.F})));
}

TEST(Gather, WhatIsNoTensorIsTheFirstReplicas) {
  const std::vector<Sample> outputs{{at::ones({2}), {}, "a"}, {at::zeros({1}), {}, "b"}};
  const Sample all = gather(outputs, c10::kCPU);
  EXPECT_EQ(all.image.numel(), 3);
  EXPECT_EQ(all.note, "a");
}

TEST(Gather, UnorderedMapsAreJoinedByKey) {
  std::vector<std::unordered_map<std::string, at::Tensor>> outputs(2);
  for (int i = 0; i < 40; ++i) {
    const std::string key = "k" + std::to_string(i), back = "k" + std::to_string(39 - i);
    outputs[0][key] = at::full({1}, i);
    outputs[1].reserve(400);
    outputs[1][back] = at::full({1}, 39 - i);
  }
  for (const auto& [key, tensor] : gather(outputs, c10::kCPU)) {
    EXPECT_EQ("k" + std::to_string(tensor[0].item<int64_t>()), key);
    EXPECT_EQ("k" + std::to_string(tensor[1].item<int64_t>()), key);
  }
}

TEST(Gather, OutputsMustBeAlike) {
  using Map = std::map<std::string, at::Tensor>;
  EXPECT_THROW(gather(std::vector<Map>{{{"a", at::ones({1})}}, {{"b", at::ones({1})}}}, c10::kCPU),
               UsageError);
  EXPECT_THROW(gather(std::vector<std::vector<at::Tensor>>{{at::ones({1})}, {}}, c10::kCPU),
               UsageError);
  EXPECT_THROW(gather(std::vector<at::Tensor>{}, c10::kCPU), UsageError);
}

}  // namespace scatter_gather_test
}  // namespace lockstep
