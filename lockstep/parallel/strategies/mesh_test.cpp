// Every strategy over meshes of pp, dp_replicate and dp_shard, against one process.

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/optim/clip.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/parallel/training_mesh.h"
#include "tests/support/pipeline_test_models.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace mesh_test {

using pipeline_test::Batch;
using pipeline_test::batch_of;
using pipeline_test::Chain;
using pipeline_test::mean_square;
using test::run_group;

constexpr int kLayers = 8, kMicroBatches = 2, kAccumulated = 2;
const bool kLong = std::getenv("LOCKSTEP_LONG_TESTS") != nullptr;

/// A bias before batch norm has rounding for a gradient, which Adam would make a step of.
OptimizerFactory adam() {
  return [](std::vector<at::Tensor> parameters) {
    return make_optimizer("adam", std::move(parameters), {.lr = 0.01, .eps = 1e-3});
  };
}

/// Its first layer is its last, too.
struct Tied : Chain {
  Tied() : Chain(kLayers) {}
  std::vector<Layer> layers() {
    std::vector<Layer> all = Chain::layers();
    auto linear = linears.front();
    all.push_back(
        {"again", linear.ptr(), [linear](const at::Tensor& x) mutable { return linear(x); }});
    return all;
  }
};

struct Case {
  std::string strategy;
  int pp, replicate, shard;
  int ranks() const { return pp * replicate * shard; }
  int shares() const { return replicate * shard; }
  std::string mesh() const {
    std::vector<MeshDimension> dimensions;
    if (pp > 1) dimensions.push_back({"pp", pp});
    if (replicate > 1 || strategy == "ddp") dimensions.push_back({"dp_replicate", replicate});
    if (strategy != "ddp") dimensions.push_back({"dp_shard", shard});
    return mesh_text(dimensions);
  }
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << one.strategy << " " << one.mesh();
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string strategy : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (int pp = 1; pp <= 8; ++pp) {
      for (int replicate = 1; pp * replicate <= 8; ++replicate) {
        for (int shard = 1; pp * replicate * shard <= 8; ++shard) {
          if (strategy == "ddp" && shard > 1) continue;
          const Case one{strategy, pp, replicate, shard};
          const bool is_short = one.ranks() == 4 && pp < 4 && (strategy == "ddp" || shard > 1);
          const bool whole = one.ranks() == 8 && pp == 2 && replicate == 2 && strategy == "fsdp";
          if (kLong ? one.ranks() > 1 : is_short || whole) all.push_back(one);
        }
      }
    }
  }
  return all;
}

Batch batch_at(int step, int accumulated, int share) {
  return batch_of(4, step * 100 + accumulated * 10 + share);
}

/// What one process does: all shares' batches, as they are cut. Batch norm's statistics are those
/// of the first share.
template <class Model>
void train_alone(Model& model, Optimizer& optimizer, const Case& mesh, int step, double clip) {
  const int parts = mesh.pp > 1 ? kMicroBatches : 1;
  for (int i = 0; i < kAccumulated; ++i) {
    for (int share = 0; share < mesh.shares(); ++share) {
      const Batch batch = batch_at(step, i, share);
      std::vector<at::Tensor> before;
      for (const at::Tensor& buffer : model.buffers()) before.push_back(buffer.clone());
      const auto inputs = batch.input.chunk(parts), targets = batch.target.chunk(parts);
      for (int part = 0; part < parts; ++part) {
        const at::Tensor output = pipeline_test::through(model.layers(), inputs[part]);
        backward(mean_square(output, targets[part]) / (kAccumulated * mesh.shares() * parts));
      }
      for (size_t b = 0; share > 0 && b < before.size(); ++b) model.buffers()[b].copy_(before[b]);
    }
  }
  if (clip > 0) clip_grad_norm(model.parameters(), clip);
  optimizer.step();
  zero_grad(model.parameters());
}

template <class Model>
std::unique_ptr<Strategy> wrap(const std::shared_ptr<Model>& model, const ProcessGroup& group,
                               const Case& mesh) {
  StrategySetup setup;
  setup.module = model;
  setup.layers = model->layers();
  setup.make_optimizer = adam();
  setup.group = group;
  setup.options.mesh = mesh.mesh();
  if (mesh.pp > 1)
    setup.options.pipeline =
        PipelineOptions{.num_micro_batches = kMicroBatches, .balance = "parameters"};
  return make_strategy(mesh.strategy, setup);
}

template <class Model>
void train(const std::shared_ptr<Model>& model, Strategy& strategy, int step, double clip) {
  for (int i = 0; i < kAccumulated; ++i) {
    const Batch batch = batch_at(step, i, strategy.data_share().rank);
    BatchWork work;
    work.input = batch.input;
    work.target = batch.target;
    work.criterion = [](const at::Tensor& output, const at::Tensor& target) {
      return mean_square(output, target) / kAccumulated;
    };
    work.loss = [&] {
      return work.criterion(pipeline_test::through(model->layers(), work.input), work.target);
    };
    work.last_of_step = i == kAccumulated - 1;
    strategy.run_batch(work);
  }
  if (clip > 0) strategy.clip_grad_norm(clip);
  strategy.step();
  strategy.zero_grad();
}

/// Rank 0's states on all ranks, which are threads of one process.
struct States {
  StateDict model, optimizer;
};
States states_of(Strategy& strategy, const ProcessGroup& group, States& shared) {
  const auto copied = [](StateDict state) {
    for (auto& [name, tensor] : state) tensor = tensor.detach().clone();
    return state;
  };
  States mine{copied(strategy.model_state()), copied(strategy.optimizer_state())};
  EXPECT_EQ(mine.model.empty(), group.rank() != 0);
  EXPECT_EQ(mine.optimizer.empty(), group.rank() != 0);
  if (group.rank() == 0) shared = mine;
  group.barrier();
  mine = shared;
  group.barrier();
  return mine;
}

void expect_close(const StateDict& found, const StateDict& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, expected[i].first) << what;
    // Sums over ranks, and the norm of gradients in parts, have another order than in one process.
    EXPECT_TRUE(at::allclose(found[i].second, expected[i].second, 1e-4, 1e-6))
        << what << ": " << found[i].first << " by "
        << (found[i].second - expected[i].second).abs().max().item<double>();
  }
}

template <class Model>
std::shared_ptr<Model> make_model() {
  if constexpr (std::is_same_v<Model, Chain>)
    return std::make_shared<Chain>(kLayers);
  else
    return std::make_shared<Model>();
}

class Mesh : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, Mesh, testing::ValuesIn(cases()));

/// The state in the middle goes on under a mesh of the same shares with no pipeline, or fewer.
template <class Model>
void check(const Case& mesh) {
  const int steps = kLong ? 20 : 4;
  constexpr double kClip = 0.05;
  const auto alone = make_model<Model>();
  const auto optimizer = adam()(unique_parameters(alone->parameters()));
  for (int step = 0; step < steps; ++step) train_alone(*alone, *optimizer, mesh, step, kClip);
  States shared;
  run_group(mesh.ranks(),
            [&](ProcessGroup group) {
              const auto first = make_model<Model>();
              const auto strategy = wrap(first, group, mesh);
              EXPECT_EQ(strategy->data_share().size, mesh.shares());
              for (int step = 0; step < steps / 2; ++step) train(first, *strategy, step, kClip);
              const States middle = states_of(*strategy, group, shared);
              const auto second = make_model<Model>();
              const auto next = wrap(second, group, mesh);
              next->load_model_state(middle.model);
              next->load_optimizer_state(middle.optimizer);
              for (int step = steps / 2; step < steps; ++step) train(second, *next, step, kClip);
              const States end = states_of(*next, group, shared);
              expect_close(end.model, state_dict(*alone), "model");
              expect_close(end.optimizer, optimizer->state(), "optimizer");
            },
            {.backend = "shm"});
}

TEST_P(Mesh, TrainsAsOneProcess) {
  check<Chain>(GetParam());
}

TEST_P(Mesh, TrainsTiedWeightsAsOneProcess) {
  check<Tied>(GetParam());
}

TEST(Meshes, AStateGoesOnUnderAnotherMesh) {
  const std::vector<Case> meshes{{"fsdp", 2, 1, 2},  {"zero2", 1, 2, 2}, {"ddp", 4, 1, 1},
                                 {"zero1", 2, 1, 2}, {"fsdp", 1, 2, 2},  {"ddp", 1, 4, 1}};
  States shared;
  run_group(4,
            [&](ProcessGroup group) {
              States last;
              for (size_t i = 0; i < meshes.size(); ++i) {
                const auto model = make_model<Tied>();
                const auto strategy = wrap(model, group, meshes[i]);
                if (i > 0) {
                  strategy->load_model_state(last.model);
                  strategy->load_optimizer_state(last.optimizer);
                  const States loaded = states_of(*strategy, group, shared);
                  for (size_t k = 0; k < loaded.model.size(); ++k)
                    EXPECT_TRUE(at::equal(loaded.model[k].second, last.model[k].second));
                  ASSERT_EQ(loaded.optimizer.size(), last.optimizer.size()) << meshes[i].mesh();
                  for (size_t k = 0; k < loaded.optimizer.size(); ++k)
                    EXPECT_TRUE(at::equal(loaded.optimizer[k].second, last.optimizer[k].second))
                        << meshes[i].mesh() << loaded.optimizer[k].first;
                }
                train(model, *strategy, static_cast<int>(i), 0);
                last = states_of(*strategy, group, shared);
              }
            },
            {.backend = "shm"});
}

/// Sums have the same order: of the micro-batches, then of the ranks.
TEST(Meshes, StrategiesOfAPipelineHaveTheSameBits) {
  States shared;
  run_group(4,
            [&](ProcessGroup group) {
              StateDict expected;
              for (const std::string strategy : {"ddp", "zero1", "zero2", "fsdp"}) {
                const bool whole = strategy == "ddp";
                const auto model = make_model<Tied>();
                const auto its = wrap(model, group, {strategy, 2, whole ? 2 : 1, whole ? 1 : 2});
                for (int step = 0; step < 4; ++step) train(model, *its, step, 0);
                const StateDict found = states_of(*its, group, shared).model;
                if (whole) expected = found;
                for (size_t i = 0; i < found.size(); ++i)
                  EXPECT_TRUE(at::equal(found[i].second, expected[i].second))
                      << strategy << ": " << found[i].first;
              }
            },
            {.backend = "shm"});
}

/// Of four stages one is a lone activation, and one is frozen.
TEST(Meshes, StagesNeedNotTrainAnything) {
  for (const std::string strategy : {"ddp", "zero1", "zero2", "fsdp"}) {
    run_group(8,
              [&](ProcessGroup group) {
                const auto model = make_model<Chain>();
                for (at::Tensor parameter : model->linears.back()->parameters())
                  parameter.set_requires_grad(false);
                StrategySetup setup;
                setup.module = model;
                const std::vector<Layer> all = model->layers();
                const auto tanh = [](const at::Tensor& x) { return at::tanh(x); };
                setup.layers = {all.begin(), all.end() - 1};
                setup.layers.push_back({"tanh", nullptr, tanh});
                setup.layers.push_back(all.back());
                setup.make_optimizer = adam();
                setup.group = group;
                setup.options.mesh = "pp=4,dp=2";
                setup.options.pipeline =
                    PipelineOptions{.num_micro_batches = 2, .plan = {"linear3", "tanh", "linear7"}};
                if (strategy == "fsdp")
                  setup.options.fsdp = FsdpOptions{.units = {"linear0", "linear4"}};
                const auto its = make_strategy(strategy, setup);
                const at::Tensor before = model->linears.front()->weight.sum().detach().clone();
                for (int step = 0; step < 2; ++step) train(model, *its, step, 0.05);
                const StateDict state = its->model_state();
                if (group.rank() != 0) return;
                EXPECT_EQ(state.size(), state_dict(*model).size());
                for (const auto& [name, tensor] : state)
                  EXPECT_FALSE(at::isnan(tensor).any().item<bool>()) << name;
                EXPECT_FALSE(at::equal(state.front().second.sum(), before));
              },
              {.backend = "shm"});
  }
}

TEST(Meshes, WhatDoesNotGoTogetherNamesBoth) {
  const auto expect = [](const std::string& strategy, const StrategyOptions& options,
                         const std::vector<std::string>& words) {
    try {
      (void)data_share(strategy, options, 0, 4);
      ADD_FAILURE() << strategy << " took " << options.mesh;
    } catch (const UsageError& error) {
      for (const std::string& word : words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  expect("dp", {.mesh = "dp=4"}, {"dp", "mesh"});
  expect("ddp", {.mesh = "dp_shard=4"}, {"ddp", "dp_shard"});
  expect("fsdp", {.mesh = "dp_replicate=4"}, {"fsdp", "dp_shard"});
  expect("fsdp", {.mesh = "dp=2,dp_shard=2"}, {"dp", "dp_shard"});
  expect("zero1", {.mesh = "tp=4"}, {"tp", "dp_shard"});
  expect("pipeline", {.mesh = "dp=4"}, {"pipeline", "pp"});
  expect("ddp", {.logical_shards = LogicalShardsOptions{.count = 4}, .mesh = "dp=4"},
         {"shards", "mesh"});
  EXPECT_EQ(data_share("fsdp", {.mesh = "dp_replicate=2,pp=2,dp_shard=2"}, 6, 8).rank, 2);
}

TEST(Meshes, HostsMakeReplicasOfEqualSize) {
  using Dimensions = std::vector<MeshDimension>;
  const auto of = [](const std::vector<std::string>& keys) { return detail::mesh_by_hosts(keys); };
  EXPECT_EQ(of({"a", "a", "b", "b"}), (Dimensions{{"dp_replicate", 2}, {"dp_shard", 2}}));
  EXPECT_EQ(of({"a", "a", "a"}), (Dimensions{{"dp_shard", 3}}));
  EXPECT_EQ(of({"a", "b"}), (Dimensions{{"dp_shard", 2}}));
  EXPECT_EQ(of({"a", "a", "b"}), (Dimensions{{"dp_shard", 3}}));
  EXPECT_EQ(of({"a", "b", "a", "b"}), (Dimensions{{"dp_shard", 4}}));
}

}  // namespace mesh_test
}  // namespace lockstep
