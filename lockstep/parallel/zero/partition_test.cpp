#include "lockstep/parallel/zero/parameter_shards.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

namespace lockstep::detail {
namespace partition_test {

using ::testing::ElementsAre;

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

std::vector<at::Tensor> of_sizes(const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> tensors;
  for (const int64_t size : sizes) tensors.push_back(at::zeros({size}));
  return tensors;
}

std::vector<int64_t> offsets_of(const FlatUnit& unit) {
  std::vector<int64_t> offsets;
  for (const FlatParameter& parameter : unit.parameters) offsets.push_back(parameter.offset);
  return offsets;
}

std::vector<size_t> all_of(const std::vector<at::Tensor>& parameters) {
  std::vector<size_t> indices(parameters.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

TEST(EvenLayout, GivesEveryRankAsMuch) {
  const auto parameters = of_sizes({1000, 10, 200});
  const auto layout = even_layout(parameters, {{0, 1, 2}}, 3);
  ASSERT_EQ(layout.size(), 1U);
  EXPECT_THAT(offsets_of(layout[0]), ElementsAre(0, 1024, 1088));
  EXPECT_THAT(layout[0].bounds, ElementsAre(0, 448, 896, 1344));
}

TEST(EvenLayout, CutsParametersAtMultiplesFromTheirStart) {
  const auto parameters = of_sizes({37, 777, 1, 4099, 65});
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const auto& bucket : even_layout(parameters, {{0, 1, 2, 3, 4}}, ranks)) {
      for (const int64_t bound : bucket.bounds) EXPECT_EQ(bound % kFlatBlock, 0);
      for (const int64_t offset : offsets_of(bucket)) EXPECT_EQ(offset % kFlatBlock, 0);
      // At most one multiple a parameter and one a rank is spent on that.
      EXPECT_LE(bucket.bounds.back(), 37 + 777 + 1 + 4099 + 65 + kFlatBlock * (5 + ranks));
    }
  }
}

/// The owners that Python's ZeroRedundancyOptimizer gives (by _partition_parameters, torch 2.13).
TEST(WholeLayout, IsPythonsGreedyOne) {
  const auto parameters = of_sizes({10, 700, 300, 20, 300, 40});
  const auto layout = whole_layout(parameters, all_of(parameters), 2);
  ASSERT_EQ(layout.size(), 1U);
  std::vector<size_t> order;
  for (const FlatParameter& parameter : layout[0].parameters) order.push_back(parameter.index);
  EXPECT_THAT(order, ElementsAre(1, 0, 2, 3, 4, 5));
  EXPECT_EQ(layout[0].bounds[1], offsets_of(layout[0])[1]);
}

TEST(WholeLayout, RanksWithoutParameters) {
  const auto parameters = of_sizes({5});
  const auto layout = whole_layout(parameters, all_of(parameters), 3);
  EXPECT_THAT(layout[0].bounds, ElementsAre(0, 64, 64, 64));
}

TEST(BucketsOf, KeepsToTheCapAndToOneDtype) {
  std::vector<at::Tensor> parameters = of_sizes({100, 100, 1000, 100, 0});
  parameters.push_back(at::zeros({100}, at::kDouble));
  EXPECT_THAT(buckets_of(parameters, all_of(parameters), 800),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2), ElementsAre(3, 4), ElementsAre(5)));
  EXPECT_THAT(buckets_of(parameters, {5, 3, 0}, kAll),
              ElementsAre(ElementsAre(5), ElementsAre(3, 0)));
}

}  // namespace partition_test
}  // namespace lockstep::detail
