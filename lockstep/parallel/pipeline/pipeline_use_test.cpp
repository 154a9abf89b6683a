// How a program uses the strategy: meshes, tied weights, small batches, states, mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>

#include <chrono>
#include <cmath>

#include "lockstep/base/error.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "lockstep/parallel/training_mesh.h"
#include "lockstep/parallel/whole_model.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"
#include "tests/support/pipeline_test_models.h"
#include "tests/support/published.h"

namespace lockstep {
namespace pipeline_use_test {

using pipeline_test::accumulate;
using pipeline_test::adam;
using pipeline_test::Batch;
using pipeline_test::batch_of;
using pipeline_test::Chain;
using pipeline_test::mean_square;
using test::message_of;
using test::run_group;
using ::testing::HasSubstr;

template <class Model>
StrategySetup setup_of(const std::shared_ptr<Model>& model, const ProcessGroup& group,
                       const StrategyOptions& options = {}) {
  return {.module = model,
          .layers = model->layers(),
          .make_optimizer = adam(),
          .group = group,
          .options = options};
}

BatchWork work_of(const Batch& batch, bool last_of_step = true) {
  BatchWork work;
  work.loss = nullptr;
  work.input = batch.input;
  work.target = batch.target;
  work.criterion = mean_square;
  work.last_of_step = last_of_step;
  return work;
}

void expect_same(const StateDict& given, const StateDict& expected) {
  ASSERT_EQ(given.size(), expected.size());
  for (size_t i = 0; i < given.size(); ++i) {
    EXPECT_EQ(given[i].first, expected[i].first);
    EXPECT_TRUE(at::equal(given[i].second, expected[i].second)) << given[i].first;
  }
}

class PipelineUse : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, PipelineUse, test::over_backends(), test::backend_name);

/// Two pipelines of two stages, against the mean of what two processes get for the same halves.
TEST_P(PipelineUse, AMeshAveragesOverPipelines) {
  Chain alone(6), other(6);
  const auto optimizer = adam()(alone.parameters());
  for (int step = 0; step < 3; ++step) {
    load_state_dict(other, state_dict(alone), "test");
    zero_grad(alone.parameters());
    zero_grad(other.parameters());
    accumulate(alone.layers(), batch_of(8, step), 4);
    accumulate(other.layers(), batch_of(8, step + 50), 4);
    for (size_t i = 0; i < alone.parameters().size(); ++i) {
      alone.parameters()[i].mutable_grad() =
          alone.parameters()[i].grad() / 2 + other.parameters()[i].grad() / 2;
    }
    optimizer->step();
  }
  for (const std::string mesh : {"dp=2,pp=2", "pp=2,dp=-1"}) {
    PipelineUse::run_group(4, [&](ProcessGroup group) {
      auto model = std::make_shared<Chain>(6, 1 + group.rank());
      const auto strategy = make_pipeline_strategy(setup_of(model, group, {.mesh = mesh}));
      const DataShare share = strategy->data_share();
      EXPECT_EQ(share.size, 2);
      const DataShare planned = detail::data_share_of(
          detail::training_mesh({"pipeline", false, true}, mesh, 4), group.rank());
      EXPECT_EQ(planned.rank, share.rank);
      EXPECT_EQ(planned.size, share.size);
      for (int step = 0; step < 3; ++step) {
        strategy->zero_grad();
        strategy->run_batch(work_of(batch_of(8, step + 50.0 * share.rank)));
        strategy->step();
      }
      const auto state = strategy->model_state();
      const auto optimizer_state = strategy->optimizer_state();
      EXPECT_EQ(state.empty(), group.rank() != 0);
      if (group.rank() != 0) return;
      expect_same(state, state_dict(alone));
      expect_same(optimizer_state, optimizer->state());
    });
  }
}

TEST_P(PipelineUse, ARankThatLeavesItsLoopIsToldOfWithItsSteps) {
  PipelineUse::run_group(2, [&](ProcessGroup group) {
    const auto strategy =
        make_pipeline_strategy(setup_of(std::make_shared<Chain>(6, 1), group, {.mesh = "pp=2"}));
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        strategy->zero_grad();
        strategy->run_batch(work_of(batch_of(8, step)));
        strategy->step();
      }
    };
    train(3);
    if (group.rank() == 1) return;
    try {
      train(1);
      ADD_FAILURE() << "no error";
    } catch (const PeerLeftError& error) {
      EXPECT_THAT(error.what(), HasSubstr("left its loop after 3 steps"));
    }
  });
}

/// The first and the last layer share their weight.
struct Tied : torch::nn::Module {
  Tied() {
    register_module("embedding", embedding);
    register_module("middle", middle);
    ddp_test::fill(*this, 2);
  }
  std::vector<Layer> layers() {
    auto e = embedding;
    auto m = middle;
    return {{"embedding", e.ptr(), [e](const at::Tensor& x) mutable { return e(x); }},
            {"middle", m.ptr(), [m](const at::Tensor& x) mutable { return at::tanh(m(x)); }},
            {"head", e.ptr(), [e](const at::Tensor& x) { return at::linear(x, e->weight); }}};
  }
  torch::nn::Embedding embedding{7, 5};
  torch::nn::Linear middle{5, 5};
};

TEST_P(PipelineUse, TiedWeightsGetTheSumOfTheirStages) {
  const auto batch =
      Batch{at::arange(24).reshape({8, 3}).remainder(7), pipeline_test::values({8, 3, 7}, 1)};
  Tied alone;
  const auto optimizer = adam()(alone.parameters());
  double norm = 0;
  for (int step = 0; step < 3; ++step) {
    zero_grad(alone.parameters());
    accumulate(alone.layers(), batch, 4);
    norm = clip_grad_norm(alone.parameters(), 0.01);
    optimizer->step();
  }
  PipelineUse::run_group(3, [&](ProcessGroup group) {
    auto model = std::make_shared<Tied>();
    const auto strategy = make_pipeline_strategy(setup_of(model, group));
    for (int step = 0; step < 3; ++step) {
      strategy->zero_grad();
      strategy->run_batch(work_of(batch));
      // Sums over micro-batches and stages are made in another order than in one process.
      const double stages_norm = strategy->clip_grad_norm(0.01);
      if (step == 2) {
        EXPECT_NEAR(stages_norm, norm, 1e-5 * norm);
      }
      strategy->step();
    }
    const at::Tensor own = model->embedding->weight.detach();
    if (group.rank() != 1) {
      EXPECT_TRUE(at::allclose(own, alone.embedding->weight, 1e-5, 1e-6));
    }
    const auto state = strategy->model_state();
    if (group.rank() == 0) {
      EXPECT_TRUE(at::equal(state.front().second, own));
    }
    const auto loaded = strategy->optimizer_state();
    if (group.rank() == 0) {
      EXPECT_EQ(loaded.size(), optimizer->state().size());
    }
  });
}

/// A sum over stages, which each of them has, goes into the next sum once.
TEST(PipelineBatches, TiedGradientsOfSeveralStepsAddUp) {
  const auto batch = [](double seed) {
    return Batch{at::arange(24).reshape({8, 3}).remainder(7),
                 pipeline_test::values({8, 3, 7}, seed)};
  };
  Tied alone;
  for (const double seed : {1, 2}) accumulate(alone.layers(), batch(seed), 4);
  run_group(3,
            [&](ProcessGroup group) {
              auto model = std::make_shared<Tied>();
              const auto strategy = make_pipeline_strategy(setup_of(model, group));
              for (const double seed : {1, 2}) strategy->run_batch(work_of(batch(seed)));
              if (group.rank() == 1) return;
              EXPECT_TRUE(at::allclose(model->embedding->weight.grad(),
                                       alone.embedding->weight.grad(), 1e-5, 1e-6));
            },
            {.backend = "shm"});
}

TEST_P(PipelineUse, AStateOfOneStrategyIsLoadedByAnother) {
  PipelineUse::run_group(2, [](ProcessGroup group) {
    auto whole = std::make_shared<Chain>(4), cut = std::make_shared<Chain>(4, 9);
    const auto ddp = make_ddp_strategy(setup_of(whole, group));
    const auto pipeline = make_pipeline_strategy(setup_of(cut, group));
    const auto batch = batch_of(8, 3);
    const auto loss = [&] {
      return mean_square(pipeline_test::through(whole->layers(), batch.input), batch.target);
    };
    ddp->run_batch({.loss = loss});
    ddp->step();
    // Whole states on every rank, as a checkpoint gives them.
    pipeline->load_model_state(state_dict(*whole));
    StateDict state = ddp->optimizer_state();
    if (group.rank() == 1) state = pipeline_test::adam_state_after(*whole);
    pipeline->load_optimizer_state(state);
    const auto model_back = pipeline->model_state();
    const auto optimizer_back = pipeline->optimizer_state();
    if (group.rank() == 0) {
      expect_same(model_back, state_dict(*whole));
      expect_same(optimizer_back, state);
    }
    EXPECT_THAT(message_of<Error>([&] { pipeline->load_model_state(state_dict(Chain(3))); }),
                HasSubstr("does not fit the model"));
    EXPECT_THAT(message_of<Error>([&] {
                  pipeline->load_optimizer_state({{"exp_avg.99", at::zeros({1})}});
                }),
                HasSubstr("'exp_avg.99'"));
  });
}

TEST_P(PipelineUse, PredictsOnTheLastStage) {
  Chain alone(6);
  alone.eval();
  const auto batch = batch_of(7, 5);
  const at::Tensor expected = pipeline_test::through(alone.layers(), batch.input);
  for (const std::string schedule : {"1f1b", "interleaved-1f1b"}) {
    PipelineUse::run_group(2, [&](ProcessGroup group) {
      auto model = std::make_shared<Chain>(6);
      const auto strategy = make_pipeline_strategy(
          setup_of(model, group, {.pipeline = PipelineOptions{.schedule = schedule}}));
      model->eval();
      for (int time = 0; time < 2; ++time) {
        const auto output = strategy->predict(nullptr, batch.input);
        ASSERT_EQ(output.has_value(), group.rank() == 1);
        if (output) {
          EXPECT_TRUE(at::equal(*output, expected));
        }
      }
    });
  }
}

TEST(PipelineBatches, GradientsOfSeveralBatchesAddUp) {
  Chain alone(4);
  for (const int seed : {1, 2}) accumulate(alone.layers(), batch_of(8, seed), 4);
  run_group(2,
            [&](ProcessGroup group) {
              auto model = std::make_shared<Chain>(4);
              const auto strategy = make_pipeline_strategy(setup_of(model, group));
              strategy->run_batch(work_of(batch_of(8, 1), /*last_of_step=*/false));
              EXPECT_THAT(message_of<Error>([&] { strategy->step(); }),
                          HasSubstr("gradients only add up"));
              strategy->run_batch(work_of(batch_of(8, 2)));
              for (const auto& item : alone.named_parameters()) {
                const at::Tensor& gradient = model->named_parameters()[item.key()].grad();
                if (gradient.defined()) {
                  EXPECT_TRUE(at::equal(gradient, item.value().grad())) << item.key();
                }
              }
              EXPECT_EQ(strategy->state_bytes().gradients, strategy->state_bytes().parameters);
              strategy->step();
            },
            {.backend = "shm"});
}

TEST(PipelineBatches, AreCutUnevenlyWhereTheyMust) {
  for (const std::string& schedule : pipeline_schedule_names()) {
    run_group(2,
              [&](ProcessGroup group) {
                auto model = std::make_shared<Chain>(4), whole = std::make_shared<Chain>(4);
                // Batch norm would see the parts: evaluate it.
                model->eval();
                whole->eval();
                const auto strategy = make_pipeline_strategy(
                    setup_of(model, group, {.pipeline = PipelineOptions{.schedule = schedule}}));
                for (const int64_t samples : {10, 7, 3, 1, 7}) {
                  strategy->zero_grad();
                  zero_grad(whole->parameters());
                  const auto batch = batch_of(samples, 4);
                  strategy->run_batch(work_of(batch));
                  backward(mean_square(pipeline_test::through(whole->layers(), batch.input),
                                       batch.target));
                  // The whole batch's mean: other sums, to rounding.
                  const auto gradients = whole->named_parameters();
                  for (const auto& item : model->named_parameters()) {
                    if (!item.value().grad().defined()) continue;
                    EXPECT_TRUE(
                        at::allclose(item.value().grad(), gradients[item.key()].grad(), 1e-4, 1e-6))
                        << item.key() << " for " << samples;
                  }
                }
              },
              {.backend = "shm"});
  }
}

/// A run that stopped before the last batch of an epoch goes on with it.
TEST(PipelineBatches, TheFirstOneAfterAResumeMayBeSmaller) {
  test::Published<StateDict> saved_model, saved_optimizer;  // Whole: of rank 0.
  run_group(2,
            [&](ProcessGroup group) {
              auto first = std::make_shared<Chain>(4), second = std::make_shared<Chain>(4, 9);
              first->eval();  // Batch norm would refuse a part of one sample.
              second->eval();
              const auto strategy = make_pipeline_strategy(setup_of(first, group));
              strategy->run_batch(work_of(batch_of(8, 1)));
              strategy->step();
              strategy->zero_grad();
              const auto keep = [&](const StateDict& state, auto& kept) {
                StateDict copy;
                for (const auto& [name, tensor] : state) copy.emplace_back(name, tensor.clone());
                if (group.rank() == 0) kept.set(copy);
              };
              keep(strategy->model_state(), saved_model);
              keep(strategy->optimizer_state(), saved_optimizer);
              const auto resumed = make_pipeline_strategy(setup_of(second, group));
              resumed->load_model_state(saved_model.get());
              resumed->load_optimizer_state(saved_optimizer.get());
              for (Strategy* each : {strategy.get(), resumed.get()}) {
                each->run_batch(work_of(batch_of(6, 2)));
                each->step();
                each->zero_grad();
              }
              const auto expected = strategy->model_state(), got = resumed->model_state();
              expect_same(got, expected);
            },
            {.backend = "shm"});
}

/// Gradients of a scaled loss in float16: their norm does not fit into float16.
TEST(PipelineBatches, ANormThatFloat16CannotHold) {
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return mean_square(output.to(at::kFloat), target) * 400000;
  };
  const auto batch = batch_of(8, 1);
  Chain alone(4);
  alone.to(at::kHalf);
  for (size_t i = 0; i < 4; ++i) {
    const at::Tensor input = batch.input.chunk(4)[i].to(at::kHalf);
    backward(loss(pipeline_test::through(alone.layers(), input), batch.target.chunk(4)[i]) / 4.0);
  }
  const double norm = clip_grad_norm(alone.parameters(), 100);
  ASSERT_TRUE(std::isfinite(norm));
  run_group(2,
            [&](ProcessGroup group) {
              auto model = std::make_shared<Chain>(4);
              model->to(at::kHalf);
              const auto strategy = make_pipeline_strategy(setup_of(model, group));
              BatchWork work = work_of(batch);
              work.input = batch.input.to(at::kHalf);
              work.criterion = loss;
              strategy->run_batch(work);
              EXPECT_EQ(strategy->clip_grad_norm(100), norm);
              for (const auto& item : alone.named_parameters()) {
                const at::Tensor& gradient = model->named_parameters()[item.key()].grad();
                if (gradient.defined()) {
                  EXPECT_TRUE(at::equal(gradient, item.value().grad())) << item.key();
                }
              }
            },
            {.backend = "shm"});
}

/// Such a rank has the others' rate, and takes part in everything.
TEST(PipelineBatches, AStageMayHaveNoParameters) {
  run_group(
      2,
      [](ProcessGroup group) {
        auto model = std::make_shared<Chain>(1);
        auto setup = setup_of(model, group, {.pipeline = PipelineOptions{.plan = {"end"}}});
        setup.layers.push_back({"end", nullptr, [](const at::Tensor& x) { return at::tanh(x); }});
        const auto strategy = make_pipeline_strategy(setup);
        EXPECT_EQ(strategy->lr(), 0.01);
        strategy->run_batch(work_of(batch_of(8, 1)));
        EXPECT_GT(strategy->clip_grad_norm(1), 0);
        strategy->set_lr(0.1);
        EXPECT_EQ(strategy->lr(), 0.1);
        strategy->step();
        const auto state = strategy->optimizer_state();
        EXPECT_EQ(state.size(), group.rank() == 0 ? 12 : 0);
        strategy->load_optimizer_state({});
        EXPECT_EQ(strategy->state_bytes().parameters, group.rank() == 0 ? 160 : 0);
      },
      {.backend = "shm"});
}

TEST(PipelineBatches, RecomputedActivationsGiveTheSameBits) {
  for (const std::string& schedule : pipeline_schedule_names()) {
    std::vector<StateDict> states;
    for (const bool recompute : {false, true}) {
      run_group(2,
                [&](ProcessGroup group) {
                  auto model = std::make_shared<Chain>(4);
                  const auto strategy = make_pipeline_strategy(
                      setup_of(model, group,
                               {.pipeline = PipelineOptions{.schedule = schedule,
                                                            .recompute_activations = recompute}}));
                  for (int step = 0; step < 3; ++step) {
                    strategy->zero_grad();
                    strategy->run_batch(work_of(batch_of(8, step)));
                    strategy->step();
                  }
                  const auto state = strategy->model_state();
                  if (group.rank() == 0) states.push_back(state);
                },
                {.backend = "shm"});
    }
    expect_same(states[1], states[0]);
  }
}

/// The second run drops what the first one dropped, and nobody's later numbers change.
TEST(PipelineBatches, RecomputedActivationsHaveTheirRandomNumbers) {
  std::vector<at::Tensor> gradients, later;
  for (const bool recompute : {false, true}) {
    run_group(1, [&](ProcessGroup group) {
      auto model = std::make_shared<Chain>(2);
      auto setup =
          setup_of(model, group, {.pipeline = PipelineOptions{.recompute_activations = recompute}});
      setup.layers.insert(setup.layers.begin() + 1, Layer{"drop", nullptr, [](const at::Tensor& x) {
                                                            return at::dropout(x, 0.5, true);
                                                          }});
      // The last stage's forward runs once anyway: the first of two is run again.
      setup.options.pipeline->schedule = "interleaved-1f1b";
      setup.options.pipeline->num_micro_batches = 2;
      const auto strategy = make_pipeline_strategy(setup);
      at::manual_seed(3);
      BatchWork work = work_of(batch_of(8, 1));
      work.criterion = [](const at::Tensor& output, const at::Tensor& target) {
        at::rand({2});  // A number that comes between the two runs.
        return mean_square(output, target);
      };
      strategy->run_batch(work);
      gradients.push_back(model->linears[0]->weight.grad().clone());
      later.push_back(at::randn({4}));
    });
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
  EXPECT_TRUE(at::equal(later[0], later[1]));
}

/// Batch norms of two pipelines see other batches. An evaluation takes those of the first one.
TEST(PipelineBatches, BuffersOfAllPipelinesAreSharedBeforeAnEvaluation) {
  run_group(2,
            [](ProcessGroup group) {
              auto model = std::make_shared<Chain>(3);
              const auto strategy =
                  make_pipeline_strategy(setup_of(model, group, {.mesh = "dp=2,pp=1"}));
              model->norm->running_mean.fill_(group.rank() + 3);
              strategy->share_buffers();
              EXPECT_EQ(model->norm->running_mean[0].item<float>(), 3);
            },
            {.backend = "shm"});
}

TEST(PipelineMemory, ARankKeepsItsStagesOnly) {
  run_group(2,
            [](ProcessGroup group) {
              auto model = std::make_shared<Chain>(5);
              const auto strategy = make_pipeline_strategy(
                  setup_of(model, group, {.pipeline = PipelineOptions{.plan = {"linear3"}}}));
              const int64_t linears = group.rank() == 0 ? 3 : 2, norm = group.rank() == 0 ? 10 : 0;
              EXPECT_EQ(strategy->state_bytes().parameters, (linears * 30 + norm) * 4);
              const at::Tensor other = model->linears[group.rank() == 0 ? 4 : 0]->weight;
              EXPECT_EQ(other.storage().nbytes(), sizeof(float));
              EXPECT_TRUE(other.isnan().all().item<bool>());
              EXPECT_EQ(other.sizes(), at::IntArrayRef({5, 5}));
            },
            {.backend = "shm"});
}

TEST(PipelineMistakes, AreNamed) {
  const auto refused = [](int ranks, const StrategyOptions& options,
                          const std::function<void(StrategySetup&)>& change = {}) {
    std::string text;
    run_group(ranks,
              [&](ProcessGroup group) {
                auto setup = setup_of(std::make_shared<Chain>(3), group, options);
                if (change) change(setup);
                const std::string error = message_of<Error>([&] { make_pipeline_strategy(setup); });
                if (group.rank() == 0) text = error;
              },
              {.backend = "shm"});
    return text;
  };
  EXPECT_THAT(refused(2, {.pipeline = PipelineOptions{.schedule = "interleaved-1f1b",
                                                      .stages_per_rank = 3}}),
              HasSubstr("6 stages cannot be made of 4 layers"));
  EXPECT_THAT(refused(2, {.mesh = "dp=2,pp=2"}), HasSubstr("has room for 4 ranks"));
  EXPECT_THAT(refused(2, {.mesh = "dp=2"}), HasSubstr("no dimension pp"));
  EXPECT_THAT(refused(2, {.mesh = "tp=1,pp=2"}), HasSubstr("'tp'"));
  EXPECT_THAT(refused(2, {.pipeline = PipelineOptions{.plan = {"linear9"}}}),
              HasSubstr("did you mean 'linear"));
  EXPECT_THAT(refused(2, {.pipeline = PipelineOptions{.plan = {"norm", "linear2"}}}),
              HasSubstr("makes 3, but there are 2"));
  EXPECT_THAT(refused(2, {.pipeline = PipelineOptions{.schedule = "gpipes"}}),
              HasSubstr("did you mean 'gpipe'"));
  EXPECT_THAT(
      refused(2, {.pipeline = PipelineOptions{.num_micro_batches = (int64_t{1} << 32) + 4}}),
      HasSubstr("num_micro_batches is 4294967300"));
  EXPECT_THAT(refused(2, {}, [](StrategySetup& setup) { setup.layers.clear(); }),
              HasSubstr("not known as a chain of layers"));
  EXPECT_THAT(refused(2, {}, [](StrategySetup& setup) { setup.layers.pop_back(); }),
              HasSubstr("parameter 'linear2.weight' is in none"));
  EXPECT_THAT(refused(2, {},
                      [](StrategySetup& setup) {
                        if (setup.group.rank() == 1) setup.module = std::make_shared<Chain>(4);
                      }),
              HasSubstr("strategy pipeline: the ranks have different modules"));
}

TEST_P(PipelineUse, ALostRankIsACommErrorThatNamesIt) {
  for (const std::string& schedule : pipeline_schedule_names()) {
    PipelineUse::run_group(2, [&](ProcessGroup group) {
      auto model = std::make_shared<Chain>(5);
      const auto strategy = make_pipeline_strategy(
          setup_of(model, group, {.pipeline = PipelineOptions{.schedule = schedule}}));
      strategy->run_batch(work_of(batch_of(8, 1)));
      if (group.rank() == 1) return;
      group.set_timeout(std::chrono::milliseconds(1000));
      try {
        strategy->run_batch(work_of(batch_of(8, 1)));
        ADD_FAILURE() << "no error";
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1"));
      }
    });
  }
}

}  // namespace pipeline_use_test
}  // namespace lockstep
