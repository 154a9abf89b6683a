#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "lockstep/base/error.h"
#include "tests/support/pipeline_test_models.h"

namespace lockstep {
namespace partition_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(BalanceStages, MakesTheCostliestStageAsCheapAsItCanBe) {
  EXPECT_THAT(balance_stages({1, 1, 1, 1}, 2), ElementsAre(0, 2));
  EXPECT_THAT(balance_stages({9, 1, 1, 1}, 2), ElementsAre(0, 1));
  EXPECT_THAT(balance_stages({1, 1, 1, 9}, 2), ElementsAre(0, 3));
  EXPECT_THAT(balance_stages({1, 2, 3}, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(balance_stages({5}, 1), ElementsAre(0));
}

double costliest(const std::vector<double>& costs, const std::vector<size_t>& starts) {
  double most = 0;
  for (size_t stage = 0; stage < starts.size(); ++stage) {
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : costs.size();
    double sum = 0;
    for (size_t i = starts[stage]; i < end; ++i) sum += costs[i];
    most = std::max(most, sum);
  }
  return most;
}

/// All ways to cut, one bit for each place between two layers.
TEST(BalanceStages, FindsTheBestOfAllCuts) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> cost(0, 9);
  for (int time = 0; time < 40; ++time) {
    std::vector<double> costs(8);
    for (double& one : costs) one = cost(random);
    for (int stages = 1; stages <= 5; ++stages) {
      double best = 1e9;
      for (unsigned cut = 0; cut < 128; ++cut) {
        std::vector<size_t> starts{0};
        for (size_t i = 0; i < 7; ++i) {
          if (cut >> i & 1) starts.push_back(i + 1);
        }
        if (static_cast<int>(starts.size()) == stages)
          best = std::min(best, costliest(costs, starts));
      }
      const auto starts = balance_stages(costs, stages);
      EXPECT_EQ(static_cast<int>(starts.size()), stages);
      EXPECT_TRUE(std::is_sorted(starts.begin(), starts.end(), std::less_equal<>()));
      EXPECT_EQ(costliest(costs, starts), best);
    }
  }
}

TEST(BalanceStages, RefusesMoreStagesThanLayers) {
  EXPECT_THROW(balance_stages({1, 1}, 3), UsageError);
  EXPECT_THROW(balance_stages({1, 1}, 0), UsageError);
}

TEST(PlannedStages, TakesTheNamesOfFirstLayers) {
  pipeline_test::Chain chain(4);
  const auto layers = chain.layers();  // linear0, norm, linear1, linear2, linear3
  EXPECT_THAT(planned_stages(layers, {"linear1", "linear3"}, 3), ElementsAre(0, 2, 4));
  const auto error = [&](const std::vector<std::string>& plan) {
    try {
      planned_stages(layers, plan, 3);
    } catch (const UsageError& wrong) {
      return std::string(wrong.what());
    }
    return std::string();
  };
  EXPECT_THAT(error({"linear1", "linaer3"}), HasSubstr("unknown layer 'linaer3'"));
  EXPECT_THAT(error({"linear2", "linear1"}), HasSubstr("does not come after layer 'linear2'"));
  EXPECT_THAT(error({"linear0", "linear1"}), HasSubstr("does not come after layer 'linear0'"));
  EXPECT_THAT(error({"linear1"}), HasSubstr("makes 2, but there are 3"));
}

TEST(MeasureLayerCosts, SeesSlowLayersAndChangesNothing) {
  pipeline_test::Chain chain(3);
  auto layers = chain.layers();
  double clock = 0;
  layers[2].forward = [&, inner = layers[2].forward](const at::Tensor& x) {
    clock += 40;
    return inner(x);
  };
  chain.parameters()[0].mutable_grad() = at::ones_like(chain.parameters()[0]);
  const at::Tensor mean = chain.norm->running_mean.clone();
  const auto costs =
      measure_layer_costs(layers, pipeline_test::values({4, 5}, 1), {}, [&] { return clock += 1; });
  std::vector<double> expected(layers.size(), 1);
  expected[2] = 41;
  EXPECT_EQ(costs, expected);
  EXPECT_TRUE(at::equal(chain.norm->running_mean, mean));
  EXPECT_TRUE(at::equal(chain.parameters()[0].grad(), at::ones_like(chain.parameters()[0])));
  EXPECT_FALSE(chain.parameters()[1].grad().defined());
}

TEST(EstimateLayerCosts, CountsParameters) {
  pipeline_test::Chain chain(1);
  EXPECT_THAT(estimate_layer_costs(chain.layers()), ElementsAre(31, 11));
}

}  // namespace partition_test
}  // namespace lockstep
