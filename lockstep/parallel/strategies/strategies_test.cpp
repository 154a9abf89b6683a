#include "lockstep/parallel/strategies/strategies.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/state_dict.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace strategies_test {

using test::run_group;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::nn::Linear;

std::shared_ptr<torch::nn::SequentialImpl> make_module() {
  return torch::nn::Sequential(Linear(3, 4), Linear(4, 4), Linear(4, 2)).ptr();
}

StateDict copy_of(StateDict state) {
  for (auto& [name, tensor] : state) tensor = tensor.detach().clone();
  return state;
}

std::unique_ptr<Strategy> wrap(const std::string& name,
                               const std::shared_ptr<torch::nn::SequentialImpl>& module,
                               const ProcessGroup& group, const StrategyOptions& options = {}) {
  StrategySetup setup;
  setup.options = options;
  setup.module = module;
  for (const auto& child : module->named_children()) {
    const auto linear = std::dynamic_pointer_cast<torch::nn::LinearImpl>(child.value());
    setup.layers.push_back(
        {child.key(), linear, [linear](const at::Tensor& x) { return linear->forward(x); }});
  }
  setup.make_optimizer = [](std::vector<at::Tensor> parameters) {
    return make_optimizer("adam", std::move(parameters), {.lr = 0.01});
  };
  setup.group = group;
  if (name == "pipeline") setup.options.pipeline = PipelineOptions{.balance = "parameters"};
  return make_strategy(name, setup);
}

void backward(Strategy& strategy, torch::nn::SequentialImpl& module, int rank) {
  BatchWork work;
  work.input = at::full({8, 3}, rank + 1.0);
  work.target = at::zeros({8, 2});
  work.criterion = [](const at::Tensor& output, const at::Tensor& target) {
    return at::mse_loss(output, target);
  };
  work.loss = [&] { return work.criterion(module.forward(work.input), work.target); };
  strategy.run_batch(work);
}

void step(Strategy& strategy, torch::nn::SequentialImpl& module, int rank) {
  backward(strategy, module, rank);
  strategy.step({});
  strategy.zero_grad();
}

/// A living module goes from one strategy to the next, as from one generation to the next.
TEST(Strategies, EachTakesAModuleThatAnyOtherHasLeft) {
  const StateDict weights = copy_of(state_dict(*make_module()));
  run_group(2, [&](ProcessGroup group) {
    for (const auto& second : strategy_names()) {
      if (second == "dp") continue;  // It has one rank.
      const auto fresh = make_module();
      const auto alone = wrap(second, fresh, group);
      alone->load_model_state(weights);
      step(*alone, *fresh, group.rank());
      const StateDict wanted = alone->model_state();
      for (const auto& first : strategy_names()) {
        if (first == "dp") continue;
        const auto module = make_module();
        step(*wrap(first, module, group), *module, group.rank());
        const auto next = wrap(second, module, group);
        next->load_model_state(weights);
        step(*next, *module, group.rank());
        const StateDict found = next->model_state();
        ASSERT_EQ(found.size(), wanted.size());
        for (size_t i = 0; i < found.size(); ++i)
          // Products add in an order that follows from where memory lies: one last bit.
          EXPECT_TRUE(at::allclose(found[i].second, wanted[i].second, 1e-6, 1e-8))
              << first << ", then " << second << ": " << found[i].first;
      }
    }
  });
}

/// Options, as messages name them, and the strategies that take them.
struct Kind {
  std::string name;
  std::vector<std::string> takers;
  StrategyOptions options;
};

TEST(Strategies, RefuseTheOptionsOfOthersByName) {
  const std::vector<Kind> kinds{
      {"ddp options", {"ddp"}, {.ddp = DdpOptions()}},
      {"zero options", {"zero1", "zero2"}, {.zero = ZeroOptions()}},
      {"fsdp options", {"fsdp"}, {.fsdp = FsdpOptions()}},
      {"pipeline options", {"pipeline"}, {.pipeline = PipelineOptions()}},
      {"dp options", {"dp"}, {.dp = DataParallelOptions()}},
      {"logical shards", {"ddp"}, {.logical_shards = LogicalShardsOptions{.count = 1}}},
      {"mesh", {"ddp", "zero1", "zero2", "fsdp", "pipeline"}, {.mesh = "pp=1"}}};
  for (const std::string& strategy : strategy_names()) {
    for (const Kind& kind : kinds) {
      StrategySetup setup;
      setup.options = kind.options;
      if (std::find(kind.takers.begin(), kind.takers.end(), strategy) != kind.takers.end()) {
        EXPECT_NO_THROW(data_share(strategy, kind.options, 0, 1)) << kind.name;
        continue;
      }
      const auto names_both = ThrowsMessage<UsageError>(
          AllOf(HasSubstr("strategy " + strategy + " "), HasSubstr("no " + kind.name)));
      EXPECT_THAT([&] { data_share(strategy, kind.options, 0, 1); }, names_both);
      EXPECT_THAT([&] { make_strategy(strategy, setup); }, names_both);
    }
  }
  const StrategyOptions both{.ddp = DdpOptions(),
                             .logical_shards = LogicalShardsOptions{.count = 1}};
  EXPECT_THROW(data_share("ddp", both, 0, 1), UsageError);
  EXPECT_THROW(data_share("ddp", {.logical_shards = LogicalShardsOptions()}, 0, 1), UsageError);
}

/// Also of one rank, where there is nothing to send.
TEST(Strategies, DdpCallsAHookOfTheUsersOwn) {
  for (const int ranks : {1, 2}) {
    std::atomic<int> calls = 0;
    run_group(ranks, [&](ProcessGroup group) {
      const auto module = make_module();
      DdpOptions ddp;
      ddp.custom_hook = [&](const ProcessGroup&, GradientBucket& bucket) {
        ++calls;
        return bucket.gradients.zero_();
      };
      const auto strategy = wrap("ddp", module, group, {.ddp = ddp});
      backward(*strategy, *module, group.rank());
      EXPECT_EQ(strategy->clip_grad_norm(1), 0);
    });
    EXPECT_EQ(calls, ranks);
  }
}

/// The module's own zero_grad does not reach the shards'.
TEST(Strategies, TellWhenGradientsOfBeforeAStepAddUp) {
  for (const std::string name : {"zero2", "fsdp"}) {
    testing::internal::CaptureStderr();
    run_group(2, [&](ProcessGroup group) {
      const auto module = make_module();
      const auto strategy = wrap(name, module, group);
      for (int batch = 0; batch < 3; ++batch) backward(*strategy, *module, group.rank());
      step(*strategy, *module, group.rank());
      backward(*strategy, *module, group.rank());
      strategy->step({});
    });
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << name;
    testing::internal::CaptureStderr();
    run_group(2, [&](ProcessGroup group) {
      const auto module = make_module();
      const auto strategy = wrap(name, module, group);
      for (int batch = 0; batch < 3; ++batch) {
        backward(*strategy, *module, group.rank());
        strategy->step({});
        module->zero_grad();
      }
    });
    EXPECT_NE(testing::internal::GetCapturedStderr(), "") << name;
  }
}

/// A pipeline's module has the values of this rank's layers only.
TEST(Strategies, AStateIsNotReadWhereValuesAreOnAnotherRank) {
  run_group(2, [](ProcessGroup group) {
    const auto module = make_module();
    const StateDict weights = copy_of(state_dict(*module));
    const auto strategy = wrap("pipeline", module, group);
    EXPECT_THROW(detail::require_values(state_dict(*module)), UsageError);
    EXPECT_THROW(load_state_dict(*module, weights, "weights"), UsageError);
    strategy->load_model_state(weights);
    const size_t whole = strategy->model_state().size();  // On rank 0.
    EXPECT_EQ(whole, group.rank() == 0 ? weights.size() : 0);
  });
}

}  // namespace strategies_test
}  // namespace lockstep
