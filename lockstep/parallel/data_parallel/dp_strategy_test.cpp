#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/base/error.h"
#include "lockstep/parallel/whole_model.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace dp_strategy_test {

namespace nn = torch::nn;
using ddp_test::fill;
using ddp_test::values;
using ::testing::HasSubstr;

struct Job {
  nn::Sequential net{nn::Linear(6, 5), nn::Tanh(), nn::Linear(5, 3)};
  StrategySetup setup;

  explicit Job(const ProcessGroup& group, int64_t replicas) {
    at::set_num_threads(1);
    fill(*net, 0);
    setup.module = net.ptr();
    setup.forward = [](nn::Module& module, const at::Tensor& x) {
      return dynamic_cast<nn::SequentialImpl&>(module).forward(x);
    };
    setup.make_optimizer = [](std::vector<at::Tensor> parameters) {
      return make_optimizer("adam", std::move(parameters), {.lr = 0.01});
    };
    setup.group = group;
    setup.options.dp = DataParallelOptions{.replicas = replicas};
  }

  BatchWork work(int step) {
    const at::Tensor x = values({10, 6}, step), y = at::arange(10).remainder(3);
    const auto criterion = [](const at::Tensor& output, const at::Tensor& target) {
      return nn::functional::cross_entropy(output, target);
    };
    return {.loss = [this, x, y, criterion] { return criterion(net->forward(x), y); },
            .input = x,
            .target = y,
            .criterion = criterion};
  }

  std::vector<at::Tensor> train(Strategy& strategy, int steps) {
    for (int step = 0; step < steps; ++step) {
      strategy.run_batch(work(step));
      strategy.clip_grad_norm(0.5);
      strategy.step();
      strategy.zero_grad();
    }
    std::vector<at::Tensor> weights;
    for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
    return weights;
  }
};

TEST(DpStrategy, TrainsAsOneModule) {
  test::run_group(1, [](const ProcessGroup& group) {
    Job plain(group, 0);
    const auto expected = plain.train(*make_ddp_strategy(plain.setup), 10);
    for (const int64_t replicas : {1, 2, 3}) {
      Job job(group, replicas);
      const auto strategy = make_dp_strategy(job.setup);
      const auto weights = job.train(*strategy, 10);
      EXPECT_EQ(strategy->data_share().size, 1);
      for (size_t p = 0; p < weights.size(); ++p) {
        EXPECT_TRUE(replicas > 1 || at::equal(weights[p], expected[p]));
        // The sums over rows are made in parts; Adam divides by their roots.
        EXPECT_TRUE(at::allclose(weights[p], expected[p], 1e-4, 1e-5)) << replicas;
      }
    }
  });
}

TEST(DpStrategy, PredictsWithoutAGraph) {
  test::run_group(1, [](const ProcessGroup& group) {
    Job job(group, 2);
    const auto strategy = make_dp_strategy(job.setup);
    const at::Tensor x = values({5, 6}, 3);
    const auto forward = [&] { return job.net->forward(x); };
    const auto output = strategy->predict(forward, x);
    ASSERT_TRUE(output);
    EXPECT_FALSE(output->requires_grad());
    EXPECT_TRUE(at::allclose(*output, job.net->forward(x)));
    EXPECT_TRUE(at::equal(*strategy->predict(forward, {}), job.net->forward(x)));
  });
}

TEST(DpStrategy, StateIsTheModules) {
  test::run_group(1, [](const ProcessGroup& group) {
    Job job(group, 2);
    const auto strategy = make_dp_strategy(job.setup);
    job.train(*strategy, 2);
    const auto model = strategy->model_state();
    EXPECT_EQ(model.front().first, "0.weight");
    Job other(group, 0);
    const auto ddp = make_ddp_strategy(other.setup);
    ddp->load_model_state(model);
    ddp->load_optimizer_state(strategy->optimizer_state());
    const auto expected = job.train(*strategy, 1), got = other.train(*ddp, 1);
    for (size_t p = 0; p < got.size(); ++p) {
      EXPECT_TRUE(at::allclose(got[p], expected[p], 1e-5, 1e-6));
    }
    // Parameters and Adam's two moments; no gradients now. Replicas have nothing of their own.
    const StateBytes bytes = strategy->state_bytes();
    EXPECT_EQ(bytes.parameters, 4 * (6 * 5 + 5 + 5 * 3 + 3));
    EXPECT_EQ(bytes.gradients, 0);
  });
}

template <class Call>
std::string usage_error_of(const Call& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no UsageError";
}

TEST(DpStrategy, WrongUse) {
  test::run_group(1, [](const ProcessGroup& group) {
    Job job(group, 2);
    const auto strategy = make_dp_strategy(job.setup);
    EXPECT_THAT(usage_error_of([&] { strategy->run_batch({.loss = job.work(0).loss}); }),
                HasSubstr("hint: dp cuts batches itself"));
    BatchWork first = job.work(0);
    first.last_of_step = false;
    strategy->run_batch(first);
    EXPECT_THAT(usage_error_of([&] { strategy->step(); }), HasSubstr("gradients only add up"));
    strategy->run_batch(job.work(1));
    strategy->step();
    job.setup.forward = nullptr;
    EXPECT_THAT(usage_error_of([&] { make_dp_strategy(job.setup); }),
                HasSubstr("hint: set StrategySetup::forward"));
    Job negative(group, -1);
    EXPECT_THAT(usage_error_of([&] { make_dp_strategy(negative.setup); }),
                HasSubstr("-1 replicas"));
  });
  test::run_group(2,
                  [](const ProcessGroup& group) {
                    Job job(group, 2);
                    EXPECT_THAT(usage_error_of([&] { make_dp_strategy(job.setup); }),
                                HasSubstr("one process, not in 2 ranks"));
                  },
                  {.backend = "shm"});
}

}  // namespace dp_strategy_test
}  // namespace lockstep
