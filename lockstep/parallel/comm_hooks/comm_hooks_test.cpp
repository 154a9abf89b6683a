#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/averaging/averagers.h"
#include "lockstep/parallel/comm_hooks/power_sgd_hook.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace comm_hooks_test {

using ddp_test::fill;
using ddp_test::Net;
using ddp_test::values;
using ::testing::HasSubstr;

class CommHooks : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(Over, CommHooks, test::over_backends(), test::backend_name);

/// The gradients of some steps with a hook: all parameters' in one vector, a step each. Those of
/// the last rank are infinite in the step `overflow`.
std::vector<at::Tensor> gradients(const ProcessGroup& group, const AsyncGradientHook& hook,
                                  int steps, int overflow = -1) {
  auto net = std::make_shared<Net>();
  fill(*net, 0);
  DistributedDataParallel<std::shared_ptr<Net>> ddp(net, group,
                                                    {.init_sync = true, .async_custom_hook = hook});
  std::vector<at::Tensor> all;
  for (int step = 0; step < steps; ++step) {
    zero_grad(net->parameters());
    const bool overflows = step == overflow && group.rank() + 1 == group.size();
    const double factor = overflows ? std::numeric_limits<double>::infinity() : 1;
    (ddp.forward(values({4, 6}, step + 0.3 * group.rank())).square().mean() * factor).backward();
    std::vector<at::Tensor> flat;
    for (const auto& parameter : net->parameters()) flat.push_back(parameter.grad().flatten());
    all.push_back(at::cat(flat));
  }
  return all;
}

TEST_P(CommHooks, PostLocalSgdLeavesTheWholeGroupForASmallerOne) {
  run_group(4, [](const ProcessGroup& group) {
    const ProcessGroup pair = new_subgroups(group, 2);
    auto state = std::make_shared<PostLocalSGDState>(group, pair, 2);
    const auto got = gradients(group, post_local_sgd_hook(state), 4);
    const auto whole = gradients(group, {}, 4);
    EXPECT_EQ(state->iter, 2);
    // Two of the ranks have the same pair's mean, which is not the whole group's.
    for (int step = 0; step < 4; ++step) {
      EXPECT_EQ(at::allclose(got[step], whole[step], 1e-5, 1e-7), step < 2) << step;
      std::vector<at::Tensor> pairs(2, at::empty_like(got[step]));
      pairs[1] = at::empty_like(got[step]);
      pair.all_gather(pairs, got[step]);
      EXPECT_TRUE(at::equal(pairs[0], pairs[1]));
    }
    auto alone = std::make_shared<PostLocalSGDState>(group, pair, 1, false);
    const auto own = gradients(group, post_local_sgd_hook(alone), 2);
    std::vector<at::Tensor> pairs{at::empty_like(own[1]), at::empty_like(own[1])};
    pair.all_gather(pairs, own[1]);
    EXPECT_FALSE(at::allclose(pairs[0], pairs[1]));
  });
}

TEST_P(CommHooks, PowerSgdOfFullRankIsTheMean) {
  run_group(3, [](const ProcessGroup& group) {
    for (const bool batched : {false, true}) {
      auto state = std::make_shared<PowerSGDState>(
          PowerSGDOptions{.matrix_approximation_rank = batched ? 8 : 6,
                          .start_power_sgd_iter = 2,
                          .min_compression_rate = 0.01});
      const auto got =
          gradients(group, batched ? batched_power_sgd_hook(state) : power_sgd_hook(state), 6);
      const auto whole = gradients(group, {}, 6);
      for (size_t step = 0; step < got.size(); ++step) {
        // M = P (P^T M) for an orthogonal basis P of all columns, with rounding.
        EXPECT_TRUE(at::allclose(got[step], whole[step], 1e-3, 1e-5)) << batched << " " << step;
      }
      EXPECT_EQ(state->iter(), 6);
    }
  });
}

/// The gradient of two weights, `factor` times the input, after some steps with a hook.
at::Tensor small_gradient(const ProcessGroup& group, const AsyncGradientHook& hook, double factor) {
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 2).bias(false));
  DistributedDataParallel<torch::nn::Linear> ddp(linear, group, {.async_custom_hook = hook});
  for (int step = 0; step < 5; ++step) {
    zero_grad(linear->parameters());
    (ddp.forward(at::full({1, 3}, group.rank() + 1.0)).sum() * factor).backward();
  }
  return linear->weight.grad();
}

TEST_P(CommHooks, PowerSgdTakesSmallAndEmptyGradients) {
  run_group(2, [](const ProcessGroup& group) {
    for (const bool batched : {false, true}) {
      for (const int64_t rank : {1, 2, 4}) {
        const auto hook = [&] {
          auto state =
              std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = rank,
                                                              .start_power_sgd_iter = 2,
                                                              .min_compression_rate = 0.01,
                                                              .orthogonalization_epsilon = 1e-8});
          return batched ? batched_power_sgd_hook(state) : power_sgd_hook(state);
        };
        EXPECT_TRUE(at::equal(small_gradient(group, hook(), 0), at::zeros({2, 3})))
            << batched << " " << rank;
        // All ranks' gradients have the direction of one vector: a product of narrow matrices is
        // exact, except for a square of which the last row has zeros.
        if (batched && rank == 1) continue;
        EXPECT_TRUE(at::allclose(small_gradient(group, hook(), 1), at::full({2, 3}, 1.5), 1e-4))
            << batched << " " << rank << small_gradient(group, hook(), 1);
      }
    }
  });
}

TEST_P(CommHooks, PowerSgdAddsWhatItLost) {
  run_group(2, [](const ProcessGroup& group) {
    const auto total_error = [&](bool feedback) {
      auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{
          .start_power_sgd_iter = 2, .min_compression_rate = 0.5, .use_error_feedback = feedback});
      const auto got = gradients(group, power_sgd_hook(state), 30);
      const auto whole = gradients(group, {}, 30);
      EXPECT_GT(state->compression_stats().rate, 1);
      at::Tensor sum = at::zeros_like(got[0]);
      for (size_t step = 0; step < got.size(); ++step) sum += got[step] - whole[step];
      return sum.norm().item<double>();
    };
    EXPECT_LT(total_error(true), 0.5 * total_error(false));
  });
}

TEST_P(CommHooks, PowerSgdGoesOnAfterAnOverflow) {
  run_group(2, [](const ProcessGroup& group) {
    for (const bool batched : {false, true}) {
      auto state = std::make_shared<PowerSGDState>(
          PowerSGDOptions{.matrix_approximation_rank = batched ? 8 : 6,
                          .start_power_sgd_iter = 2,
                          .min_compression_rate = 0.01});
      const auto hook = batched ? batched_power_sgd_hook(state) : power_sgd_hook(state);
      const auto got = gradients(group, hook, 6, 3);
      const auto whole = gradients(group, {}, 6);
      EXPECT_FALSE(at::isfinite(got[3]).all().item<bool>());
      for (const size_t step : {2, 4, 5}) {
        EXPECT_TRUE(at::allclose(got[step], whole[step], 1e-3, 1e-5)) << batched << " " << step;
      }
    }
  });
}

TEST_P(CommHooks, PowerSgdGivesAllRanksTheSame) {
  run_group(2, [](const ProcessGroup& group) {
    for (const int64_t rank : {1, 2, 3}) {
      auto state =
          std::make_shared<PowerSGDState>(PowerSGDOptions{.matrix_approximation_rank = rank,
                                                          .start_power_sgd_iter = 1,
                                                          .min_compression_rate = 0.5,
                                                          .use_error_feedback = false,
                                                          .warm_start = false,
                                                          .batch_tensors_with_same_shape = true});
      const auto got = gradients(group, power_sgd_hook(state), 4).back();
      std::vector<at::Tensor> all{at::empty_like(got), at::empty_like(got)};
      group.all_gather(all, got);
      EXPECT_TRUE(at::equal(all[0], all[1]));
    }
  });
}

TEST(PowerSgd, WrongUse) {
  const auto refused = [](const PowerSGDOptions& options) {
    try {
      const PowerSGDState state(options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string("no UsageError");
  };
  EXPECT_THAT(refused({.matrix_approximation_rank = 0}), HasSubstr("rank is 0"));
  EXPECT_THAT(refused({.start_power_sgd_iter = 1}), HasSubstr("expected 2 or more"));
  EXPECT_THAT(
      refused({.start_power_sgd_iter = 1, .use_error_feedback = false, .warm_start = false}),
      HasSubstr("no UsageError"));
  EXPECT_THROW(power_sgd_hook(nullptr), UsageError);
  EXPECT_THROW(post_local_sgd_hook(nullptr), UsageError);
}

}  // namespace comm_hooks_test
}  // namespace lockstep
