#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "tests/support/over_backends.h"
#include "tests/support/pipeline_test_models.h"

namespace lockstep {
namespace pipeline_strategy_test {

using pipeline_test::accumulate;
using pipeline_test::adam;
using pipeline_test::batch_of;
using pipeline_test::Chain;
using pipeline_test::mean_square;
using ::testing::HasSubstr;

class PipelineStrategyTest : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, PipelineStrategyTest, test::over_backends(), test::backend_name);

struct Outcome {
  std::vector<double> losses;  ///< Of all micro-batches; on the last stage.
  double norm = 0;
  StateDict model;
  StateDict optimizer;
};

struct Job {
  StrategyOptions options = {.pipeline = PipelineOptions()};
  int steps = 3;
  int64_t samples = 8;
  double max_norm = 0.05;
};

BatchWork work_of(const pipeline_test::Batch& batch, std::vector<double>& losses) {
  BatchWork work;
  work.input = batch.input;
  work.target = batch.target;
  work.criterion = [&losses](const at::Tensor& output, const at::Tensor& target) {
    const at::Tensor loss = mean_square(output, target);
    losses.push_back(loss.item<double>());
    return loss;
  };
  return work;
}

Outcome train(Strategy& strategy, const Job& job) {
  Outcome run;
  const DataShare share = strategy.data_share();
  for (int step = 0; step < job.steps; ++step) {
    strategy.zero_grad();
    const auto batch = batch_of(job.samples, step + 10.0 * share.rank);
    strategy.run_batch(work_of(batch, run.losses));
    run.norm = strategy.clip_grad_norm(job.max_norm);
    strategy.step();
  }
  run.model = strategy.model_state();
  run.optimizer = strategy.optimizer_state();
  return run;
}

StrategySetup setup_of(const std::shared_ptr<Chain>& model, const ProcessGroup& group,
                       const StrategyOptions& options) {
  return {.module = model,
          .layers = model->layers(),
          .make_optimizer = adam(),
          .group = group,
          .options = options};
}

/// The same by a program of one process. With several shares of the data the gradients' mean.
Outcome train_alone(const Job& job, int shares = 1) {
  Outcome run;
  Chain model;
  const auto layers = model.layers();
  const auto optimizer = adam()(model.parameters());
  for (int step = 0; step < job.steps; ++step) {
    std::vector<at::Tensor> sums;
    const StateDict buffers = state_dict(model);
    for (int share = 0; share < shares; ++share) {
      zero_grad(model.parameters());
      Chain other;
      load_state_dict(other, state_dict(model), "test");
      const auto losses = accumulate(share == 0 ? layers : other.layers(),
                                     batch_of(job.samples, step + 10.0 * share),
                                     job.options.pipeline->num_micro_batches);
      if (share == 0) run.losses.insert(run.losses.end(), losses.begin(), losses.end());
      const auto from = share == 0 ? model.parameters() : other.parameters();
      for (size_t i = 0; i < from.size(); ++i) {
        const at::Tensor part = from[i].grad() / static_cast<double>(shares);
        share == 0 ? sums.push_back(part) : static_cast<void>(sums[i].add_(part));
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) model.parameters()[i].mutable_grad() = sums[i];
    run.norm = clip_grad_norm(model.parameters(), job.max_norm);
    optimizer->step();
  }
  run.model = state_dict(model);
  run.optimizer = optimizer->state();
  return run;
}

void expect_same(const StateDict& given, const StateDict& expected) {
  std::map<std::string, at::Tensor> by_name(given.begin(), given.end());
  EXPECT_EQ(by_name.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(by_name.contains(name)) << name;
    EXPECT_TRUE(at::equal(by_name[name], tensor)) << name;
  }
}

TEST_P(PipelineStrategyTest, IsOneProcessToTheLastBit) {
  for (const std::string& schedule : pipeline_schedule_names()) {
    Job job;
    job.options.pipeline->schedule = schedule;
    const Outcome alone = train_alone(job);
    for (const int ranks : {1, 2, 3}) {
      if (GetParam() != "shm" && ranks == 3) continue;
      run_group(ranks, [&](ProcessGroup group) {
        auto model = std::make_shared<Chain>(6, /*seed=*/1 + group.rank());
        const auto strategy = make_pipeline_strategy(setup_of(model, group, job.options));
        const Outcome run = train(*strategy, job);
        EXPECT_EQ(run.norm, alone.norm);
        const bool is_last = group.rank() == ranks - 1;
        EXPECT_EQ(run.losses, is_last ? alone.losses : std::vector<double>());
        if (group.rank() == 0) {
          expect_same(run.model, alone.model);
          expect_same(run.optimizer, alone.optimizer);
        } else {
          EXPECT_TRUE(run.model.empty() && run.optimizer.empty());
        }
      });
    }
  }
}

/// Has entries for all tensors from its construction, as float32 copies of parameters are.
struct EntriesFromTheStart : Sgd {
  using Sgd::Sgd;
  StateDict state() const override {
    StateDict state;
    for (size_t i = 0; i < parameters().size(); ++i) {
      state.emplace_back("kept." + std::to_string(i), parameters()[i].detach());
    }
    return state;
  }
};

/// Its optimizer has a tensor without elements, of which the module knows nothing.
TEST(PipelineStrategy, AStageWithoutParametersGivesNoState) {
  test::run_group(2, [](ProcessGroup group) {
    const auto model = std::make_shared<Chain>(2);
    StrategySetup setup = setup_of(model, group, {.pipeline = PipelineOptions{.plan = {"end"}}});
    setup.layers.push_back({"end", nullptr, [](const at::Tensor& x) { return x * 2; }});
    setup.make_optimizer = [](std::vector<at::Tensor> parameters) {
      return std::make_unique<EntriesFromTheStart>(std::move(parameters), OptimizerOptions());
    };
    const Outcome run = train(*make_pipeline_strategy(setup), {.steps = 1});
    EXPECT_EQ(run.optimizer.size(), group.rank() == 0 ? model->parameters().size() : 0u);
  });
}

}  // namespace pipeline_strategy_test
}  // namespace lockstep
