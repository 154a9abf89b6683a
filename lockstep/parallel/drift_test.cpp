// Ranks that drift apart are noticed, and those that only look like it are left alone.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/gradient_averager.h"
#include "lockstep/parallel/join.h"
#include "lockstep/parallel/logical_shards.h"
#include "lockstep/parallel/whole_model.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace drift_test {

using ddp_test::fill;
using ddp_test::Net;
using ddp_test::values;

/// A loop of a rank, over a GradientAverager or a wrapper.
class Loop {
 public:
  explicit Loop(const ProcessGroup& group, bool wrapped, bool check_drift = true, double lr = 0.05)
      : rank_(group.rank()) {
    fill(*net_, 1);
    if (wrapped) {
      ddp_ = std::make_unique<DistributedDataParallel<std::shared_ptr<Net>>>(
          net_, group, DdpOptions{.check_drift = check_drift});
    } else {
      averager_ = std::make_unique<GradientAverager>(
          *net_, group, GradientAveragerOptions{.check_drift = check_drift});
    }
    optimizer_ = make_optimizer("sgd", net_->parameters(), {.lr = lr});
  }

  void backward(int step) {
    const at::Tensor x = values({4, 6}, 10 * rank_ + step);
    (ddp_ ? ddp_->forward(x) : net_->forward(x)).square().mean().backward();
  }
  void step(int step) {
    backward(step);
    optimizer_->step();
    zero_grad(net_->parameters());
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) step(i);
  }
  NoSync no_sync() { return ddp_ ? ddp_->no_sync() : averager_->no_sync(); }
  Net& net() { return *net_; }
  DistributedDataParallel<std::shared_ptr<Net>>& ddp() { return *ddp_; }

 private:
  int rank_;
  std::shared_ptr<Net> net_ = std::make_shared<Net>();
  std::unique_ptr<DistributedDataParallel<std::shared_ptr<Net>>> ddp_;
  std::unique_ptr<GradientAverager> averager_;
  std::unique_ptr<Optimizer> optimizer_;
};

void expect_drift(const std::function<void()>& body, const std::string& name,
                  const std::vector<int>& ranks) {
  try {
    body();
    ADD_FAILURE() << "no error";
  } catch (const MismatchError& error) {
    EXPECT_EQ(error.failure().detail, name);
    EXPECT_EQ(error.ranks(), ranks);
  }
}

class DriftOverBackends : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, DriftOverBackends, test::over_backends(), test::backend_name);

TEST_P(DriftOverBackends, WeightsThatOneRankLoadsLaterAreNamed) {
  run_group(3, [](ProcessGroup group) {
    for (const bool wrapped : {true, false}) {
      Loop loop(group, wrapped);
      if (group.rank() == 0) loop.net().second->bias.data().add_(1);
      loop.steps(2);
      expect_drift([&] { loop.step(2); }, "second.bias", {0});
    }
  });
}

TEST_P(DriftOverBackends, ARateOfOneRanksOwnIsNoticed) {
  run_group(3, [](ProcessGroup group) {
    for (const bool wrapped : {true, false}) {
      Loop loop(group, wrapped, true, group.rank() == 1 ? 0.1 : 0.05);
      loop.steps(2);
      expect_drift([&] { loop.step(2); }, "first.weight", {1});
      Loop unchecked(group, wrapped, false, group.rank() == 1 ? 0.1 : 0.05);
      unchecked.steps(4);
    }
  });
}

/// It goes on with the next step, and so with gradients of another step than the others.
TEST_P(DriftOverBackends, ARankThatLeavesPartOfAStepOutIsNoticed) {
  run_group(2, [](ProcessGroup group) {
    const auto train = [&](Loop& loop, const std::function<void()>& part) {
      for (int step = 0; step < 4; ++step) {
        if (step == 1 && group.rank() == 1) {
          part();
          continue;
        }
        loop.step(step);
      }
    };
    for (const bool wrapped : {true, false}) {
      Loop loop(group, wrapped);
      const auto without_step = [&] {
        loop.backward(1);
        zero_grad(loop.net().parameters());
      };
      expect_drift([&] { train(loop, without_step); }, "first.weight", {1});
    }
    Loop loop(group, /*wrapped=*/true);
    const auto without_backward = [&] { loop.ddp().forward(values({4, 6}, 1)); };
    expect_drift([&] { train(loop, without_backward); }, "number of forwards", {1});
  });
}

TEST_P(DriftOverBackends, RanksMayAddUpDifferentNumbersOfBatches) {
  run_group(2, [](ProcessGroup group) {
    for (const bool wrapped : {true, false}) {
      Loop loop(group, wrapped);
      for (int step = 0; step < 12; ++step) {
        for (int i = 0; i <= group.rank(); ++i) {
          const auto guard = loop.no_sync();
          loop.backward(step + i);
        }
        loop.step(step);
      }
    }
  });
}

TEST_P(DriftOverBackends, RanksOfAJoinMayHaveDifferentNumbersOfSteps) {
  run_group(2, [](ProcessGroup group) {
    Loop loop(group, /*wrapped=*/true);
    for (int epoch = 0; epoch < 2; ++epoch) {
      Join join({loop.ddp()});
      join.run([&] { loop.steps(group.rank() == 0 ? 12 : 3); });
    }
    loop.steps(12);
  });
}

TEST(Drift, ALayerAddedAfterTheAveragerIsRefused) {
  test::run_group(2,
                  [](ProcessGroup group) {
                    struct Growing : torch::nn::Module {
                      torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 3));
                      torch::nn::Linear added{nullptr};
                    } net;
                    fill(net, 1);
                    const GradientAverager averager(net, group);
                    net.added = net.register_module("added", torch::nn::Linear(3, 1));
                    const at::Tensor y = net.added(net.first(values({4, 6}, group.rank())));
                    EXPECT_THROW(y.sum().backward(), UsageError);
                  },
                  {.backend = "shm"});
}

TEST(Drift, LogicalShardsAreComparedAndRanksMayHaveOneMore) {
  test::run_group(2,
                  [](ProcessGroup group) {
                    Net net;
                    fill(net, 1);
                    LogicalShards shards(net, group, 3, 1);
                    const auto optimizer = make_optimizer("sgd", net.parameters(), {.lr = 0.1});
                    const auto step = [&](int64_t step) {
                      for (int64_t s = shards.own().begin; s < shards.own().end; ++s) {
                        shards.run(step, s, [&] {
                          return net.forward(values({4, 6}, s + step)).square().mean();
                        });
                      }
                      optimizer->step();
                    };
                    for (int64_t i = 0; i < 12; ++i) step(i);
                    if (group.rank() == 1) optimizer->set_lr(0.2);
                    for (int64_t i = 99; i < 100; ++i) step(i);
                    expect_drift([&] { step(100); }, "first.weight", {1});
                  },
                  {.backend = "shm"});
}

/// The step that finds another rate, and what a save asks for.
TEST(Drift, AStrategyComparesTheRateAndWhatIsSaved) {
  test::run_group(
      2,
      [](ProcessGroup group) {
        const auto make = [&](bool check_drift, double lr, const DdpOptions& options = {}) {
          const auto net = std::make_shared<Net>();
          fill(*net, 1);
          StrategySetup setup;
          setup.module = net;
          setup.make_optimizer = [lr](std::vector<at::Tensor> parameters) {
            return make_optimizer("sgd", std::move(parameters), {.lr = lr});
          };
          setup.group = group;
          setup.options = {.ddp = options, .check_drift = check_drift};
          return std::pair(net, make_ddp_strategy(setup));
        };
        const auto train = [&](const auto& net, Strategy& strategy, int steps) {
          for (int i = 0; i < steps; ++i) {
            strategy.run_batch({.loss = [&] { return net->forward(values({4, 6}, i)).sum(); }});
            strategy.step();
            strategy.zero_grad();
          }
        };
        const double own = group.rank() == 1 ? 0.2 : 0.1;
        const auto [net, strategy] = make(true, own);
        train(net, *strategy, 1);
        const at::Tensor before = net->first->weight.detach().clone();
        expect_drift([&] { train(net, *strategy, 1); }, "learning rate", {1});
        // As after the death of another rank: the step before is the last that was made.
        EXPECT_TRUE(at::equal(net->first->weight, before));
        expect_drift([&] { strategy->check_equal(); }, "first.weight", {1});
        DdpOptions local;  // As of local SGD.
        local.custom_hook = [](const ProcessGroup&, GradientBucket& bucket) {
          return bucket.gradients;
        };
        const auto [apart, by_hook] = make(true, own, local);
        train(apart, *by_hook, 3);
        by_hook->check_equal();
        const auto [partly, but_one] = make(true, 0.1, {.ignored = {"first.weight"}});
        if (group.rank() == 1) partly->first->weight.detach().add_(1);
        train(partly, *but_one, 3);
        but_one->check_equal();
        const auto [other, unchecked] = make(false, own);
        train(other, *unchecked, 3);
        unchecked->check_equal();
      },
      {.backend = "shm"});
}

}  // namespace drift_test
}  // namespace lockstep
