// A user's own modules: any batch, own metrics, one optimizer or several.

#include "lockstep/train/training_module.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <csignal>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/finite_check.h"
#include "lockstep/train/step_loop.h"
#include "lockstep/train/trainer.h"
#include "tests/support/run_group.h"
#include "tests/support/small_task.h"

namespace lockstep {
namespace training_module_test {

using test::loader_of;
using test::noise_images;
using test::run_group;
using test::train_task;
using test::TrainTask;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A batch that is no lockstep::Batch, and a loader that is no DataLoader.
struct Pairs {
  at::Tensor left, right;
  int64_t size() const { return left.size(0); }
};

class PairLoader {
 public:
  PairLoader(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  void epoch(int64_t epoch, int64_t first_batch) {
    epoch_ = epoch;
    next_ = first_batch;
  }
  bool next(Pairs& pairs) {
    if (next_ == batches_per_epoch()) return false;
    const int64_t index = (epoch_ * batches_per_epoch() + next_++) * ranks_ + rank_;
    const at::Tensor left = at::arange(12, at::kFloat).reshape({4, 3}).add(index).sin();
    pairs = {left, left.cos()};
    return true;
  }
  int64_t batches_per_epoch() const { return 3; }

 private:
  int rank_, ranks_;
  int64_t epoch_ = 0, next_ = 0;
};

OptimizerFactory sgd() {
  return optimizer_factory("sgd", {.lr = 0.1, .momentum = 0.9});
}

/// Two networks that learn against each other, and a tensor that neither owns.
class Duel : public TrainingModule<Pairs> {
 public:
  Duel()
      : maker(register_module("maker", torch::nn::Linear(3, 3))),
        judge(register_module("judge", torch::nn::Linear(3, 1))),
        frozen(register_buffer("frozen", at::full({2}, 7.0))) {}

  bool automatic_optimization() const override { return false; }
  at::Tensor training_step(const Pairs& pairs, int64_t) override {
    log("judge", update("judge", [&] { return judges_loss(pairs); }), pairs.size());
    log("maker", update("maker", [&] { return makers_loss(pairs); }), pairs.size());
    return {};
  }
  void validation_step(const Pairs& pairs, int64_t) override {
    log("loss", makers_loss(pairs), pairs.size());
  }
  std::vector<OptimizerConfig> configure_optimizers() override {
    return {{.make = sgd(), .module = judge.ptr(), .name = "judge"},
            {.make = sgd(),
             .lr_at = [](int64_t step, double lr) { return lr / static_cast<double>(1 + step); },
             .module = maker.ptr(),
             .name = "maker"}};
  }
  at::Tensor judges_loss(const Pairs& pairs) {
    return judge->forward(pairs.right).square().mean() -
           judge->forward(maker->forward(pairs.left).detach()).mean();
  }
  at::Tensor makers_loss(const Pairs& pairs) {
    return judge->forward(maker->forward(pairs.left)).mean();
  }

  torch::nn::Linear maker, judge;
  at::Tensor frozen;
};

std::shared_ptr<Duel> make_duel() {
  at::manual_seed(5);
  return std::make_shared<Duel>();
}

std::vector<at::Tensor> copies(const torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : module.parameters()) all.push_back(parameter.detach().clone());
  return all;
}

void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
}

/// What PyTorch's users write: two optimizers, each with its own backward.
std::vector<at::Tensor> duel_by_hand(int epochs) {
  const auto duel = make_duel();
  const auto judges = sgd()(duel->judge->parameters());
  const auto makers = sgd()(duel->maker->parameters());
  PairLoader loader(0, 1);
  int64_t step = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    loader.epoch(epoch, 0);
    for (Pairs pairs; loader.next(pairs); ++step) {
      const auto run = [&](const at::Tensor& loss, Optimizer& optimizer) {
        zero_grad(duel->parameters());
        loss.backward();
        optimizer.step();
      };
      run(duel->judges_loss(pairs), *judges);
      makers->set_lr(0.1 / static_cast<double>(1 + step));
      run(duel->makers_loss(pairs), *makers);
    }
  }
  return copies(*duel);
}

TEST(TrainingModule, TwoOptimizersMakeTheStepsOfALoopByHand) {
  const World world = init();
  const auto duel = make_duel();
  Trainer trainer(world, {.max_epochs = 2});
  const FitResult result = trainer.fit(duel, PairLoader(0, 1), PairLoader(0, 1));
  EXPECT_EQ(result.steps, 6);
  EXPECT_EQ(result.test.samples, 12);
  expect_equal(copies(*duel), duel_by_hand(2));
}

/// A loss that does not depend on all parameters.
class HalfUsed : public TrainingModule<Pairs> {
 public:
  HalfUsed()
      : used(register_module("used", torch::nn::Linear(3, 3))),
        spare(register_module("spare", torch::nn::Linear(3, 3))) {}
  at::Tensor training_step(const Pairs& pairs, int64_t) override {
    return at::mse_loss(used->forward(pairs.left), pairs.right);
  }
  std::vector<OptimizerConfig> configure_optimizers() override { return {{.make = sgd()}}; }

  torch::nn::Linear used, spare;
};

/// The weights of `used` after an epoch on 2 ranks; those of `spare` must be as they were.
at::Tensor train_half(const TrainerOptions& options) {
  std::vector<std::shared_ptr<HalfUsed>> modules;
  std::vector<TrainTask> tasks;
  for (int rank = 0; rank < 2; ++rank) {
    at::manual_seed(5);
    modules.push_back(std::make_shared<HalfUsed>());
    tasks.push_back(train_task(modules.back(), PairLoader(rank, 2)));
  }
  const at::Tensor spare = modules[0]->spare->weight.detach().clone();
  at::Tensor used;
  run_group(2,
            [&](ProcessGroup group) {
              const auto rank = static_cast<size_t>(group.rank());
              StepLoop loop(tasks[rank], group, options);
              loop.run_epoch(0, 0, [](const StepResult&) { return true; });
              for (const auto& [name, tensor] : detail::model_state(*modules[rank], loop.parts())) {
                if (name == "spare.weight") EXPECT_TRUE(at::equal(tensor, spare));
                if (name == "used.weight") used = tensor.clone();
              }
            },
            {.backend = "shm"});
  return used;
}

TEST(TrainingModule, OptionsOfAStrategyReachIt) {
  const StrategyOptions ddp{.ddp = DdpOptions{.find_unused_parameters = true}};
  const StrategyOptions fsdp{
      .fsdp = FsdpOptions{.units = {"used", "spare"}, .find_unused_parameters = true}};
  const at::Tensor expected = train_half({.strategy_options = ddp});
  EXPECT_TRUE(at::equal(train_half({.strategy = "fsdp", .strategy_options = fsdp}), expected));
  StrategyOptions rounded = ddp;
  rounded.ddp->comm_hook = CommHook::bf16_compress;
  const at::Tensor other = train_half({.strategy_options = rounded});
  EXPECT_FALSE(at::equal(other, expected));
  EXPECT_TRUE(at::allclose(other, expected, 1e-2, 1e-2));
  const auto refused = [](const char* strategy, const StrategyOptions& options, const char* what) {
    EXPECT_THAT([&] { train_half({.strategy = strategy, .strategy_options = options}); },
                ThrowsMessage<UsageError>(HasSubstr(what)));
  };
  refused("ddp", {}, "spare.weight");
  refused("fsdp", {}, "spare.weight");
  refused("fsdp", {.fsdp = FsdpOptions{.units = {"usde"}}}, "'usde'");
}

/// Of every rank the same, and other ones than without the other ranks' data.
TEST(TrainingModule, TwoOptimizersKeepTheRanksAlike) {
  std::vector<std::vector<at::Tensor>> weights(2);
  std::vector<TrainTask> tasks;
  std::vector<std::shared_ptr<Duel>> duels;
  for (int rank = 0; rank < 2; ++rank) {
    duels.push_back(make_duel());
    tasks.push_back(train_task(duels.back(), PairLoader(rank, 2)));
  }
  run_group(2,
            [&](ProcessGroup group) {
              const auto rank = static_cast<size_t>(group.rank());
              StepLoop loop(tasks[rank], group, {});
              loop.run_epoch(0, 0, [](const StepResult&) { return true; });
              const MetricSums sums = reduce_over_ranks(group, c10::kCPU, loop.take_sums().front());
              EXPECT_EQ(sums.samples, 24);
              EXPECT_EQ(sums.named.at("judge").weight, 24);
              weights[rank] = copies(*duels[rank]);
            },
            {.backend = "shm"});
  expect_equal(weights[0], weights[1]);
  EXPECT_FALSE(at::equal(weights[0][0], duel_by_hand(1)[0]));
}

class RowsLoader {
 public:
  void epoch(int64_t, int64_t first_batch) { next_ = first_batch; }
  bool next(at::Tensor& rows) {
    if (next_ == batches_per_epoch()) return false;
    rows = at::arange(12, at::kFloat).reshape({4, 3}).add(next_++).sin();
    return true;
  }
  int64_t batches_per_epoch() const { return 2; }

 private:
  int64_t next_ = 0;
};

class RowsModule : public TrainingModule<at::Tensor> {
 public:
  at::Tensor training_step(const at::Tensor& rows, int64_t) override {
    return layer->forward(rows).square().mean();
  }
  void validation_step(const at::Tensor& rows, int64_t) override {
    log("mean", rows.mean(), rows.size(0));
  }
  std::vector<OptimizerConfig> configure_optimizers() override { return {{.make = sgd()}}; }
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(3, 1));
};

TEST(TrainingModule, ABatchCanBeATensor) {
  const World world = init();
  at::manual_seed(2);
  const auto trained = std::make_shared<RowsModule>();
  at::manual_seed(2);
  RowsModule by_hand;
  const auto optimizer = sgd()(by_hand.parameters());
  RowsLoader loader;
  for (at::Tensor rows; loader.next(rows);) {
    zero_grad(by_hand.parameters());
    by_hand.training_step(rows, 0).backward();
    optimizer->step();
  }
  Trainer trainer(world, {.max_epochs = 1});
  const FitResult result = trainer.fit(trained, RowsLoader(), RowsLoader());
  EXPECT_EQ(result.test.samples, 8);
  expect_equal(copies(*trained), copies(by_hand));
}

TEST(TrainingModule, AllOptimizersGoOnFromACheckpoint) {
  const World world = init();
  TemporaryDirectory directory;
  CheckpointFolder folder(directory.path());
  struct Saver : Callback {
    CheckpointFolder* folder = nullptr;
    void on_step(Trainer& trainer, const StepResult& result) override {
      if (result.step != 4) return;
      trainer.save(*folder);
      ::raise(SIGINT);
    }
  };
  {
    Trainer trainer(world, {.max_epochs = 2});
    const auto saver = std::make_shared<Saver>();
    saver->folder = &folder;
    trainer.add_callback(saver);
    EXPECT_THROW(trainer.fit(make_duel(), PairLoader(0, 1)), InterruptedError);
  }
  at::manual_seed(77);
  const auto duel = std::make_shared<Duel>();
  duel->frozen.zero_();
  Trainer trainer(world, {.max_epochs = 2});
  const auto saved =
      load_checkpoint(world.group(), "auto", &folder, trainer.options().identity, c10::kCPU);
  std::vector<std::string> names;
  for (const TensorShard& tensor : saved->model) names.push_back(tensor.name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("judge.weight", "judge.bias", "maker.weight",
                                                     "maker.bias", "frozen"));
  trainer.restore(*saved);
  trainer.fit(duel, PairLoader(0, 1));
  expect_equal(copies(*duel), duel_by_hand(2));
  EXPECT_TRUE(at::equal(duel->frozen, at::full({2}, 7.0)));
}

/// Notes what can be checked by hand: a mean over all samples, and a count.
class Counting : public TrainingModule<Batch> {
 public:
  Counting() : layer(register_module("layer", torch::nn::Linear(784, 10))) {}
  at::Tensor training_step(const Batch& batch, int64_t) override {
    return layer->forward(batch.data).mean();
  }
  void validation_step(const Batch& batch, int64_t index) override {
    if (index == 0) log("first", 1);
    log("mean", batch.data.mean(), batch.size());
    log_sum("even", batch.target.remainder(2).eq(0).sum().item<double>(), batch.size());
  }
  std::vector<OptimizerConfig> configure_optimizers() override { return {{.make = sgd()}}; }
  torch::nn::Linear layer;
};

TEST(TrainingModule, MetricsCountEachSampleOnceOverAllRanks) {
  const TensorDataset dataset = noise_images(23);
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<TrainTask> tasks;
    for (int rank = 0; rank < ranks; ++rank) {
      tasks.push_back(train_task(std::make_shared<Counting>(), loader_of(dataset, rank, ranks)));
    }
    run_group(ranks,
              [&](ProcessGroup group) {
                TrainTask& task = tasks[static_cast<size_t>(group.rank())];
                const Metrics metrics = evaluate(*task.module, {}, *task.train, group);
                EXPECT_EQ(metrics.samples, 23);
                EXPECT_EQ(metrics.values.at("first"), 1);
                EXPECT_EQ(metrics.values.at("even") * 23,
                          dataset.targets.remainder(2).eq(0).sum().item<double>());
                EXPECT_NEAR(metrics.values.at("mean"), dataset.data.mean().item<double>(), 1e-6);
              },
              {.backend = "shm"});
  }
}

/// Of a buffer that no optimizer's module has, each rank trains with its own.
TEST(TrainingModule, EvaluationUsesRankZerosBuffersOfNoPart) {
  std::vector<TrainTask> tasks;
  std::vector<std::shared_ptr<Duel>> duels;
  for (int rank = 0; rank < 2; ++rank) {
    duels.push_back(make_duel());
    tasks.push_back(train_task(duels.back(), PairLoader(rank, 2)));
  }
  run_group(2,
            [&](ProcessGroup group) {
              const auto rank = static_cast<size_t>(group.rank());
              StepLoop loop(tasks[rank], group, {});
              duels[rank]->frozen.fill_(1 + group.rank());
              evaluate(*duels[rank], loop.parts(), *tasks[rank].train, group);
              EXPECT_TRUE(at::equal(duels[rank]->frozen, at::ones({2})));
            },
            {.backend = "shm"});
}

/// A frozen body with batch norm, whose statistics are to stay, and a head.
struct FrozenBody : TrainingModule<at::Tensor> {
  FrozenBody() {
    for (const at::Tensor& parameter : body->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor training_step(const at::Tensor& rows, int64_t) override {
    return head->forward(body->forward(rows)).square().mean();
  }
  void validation_step(const at::Tensor& rows, int64_t) override {
    EXPECT_FALSE(head->is_training());
    log_sum("rows", rows.size(0), 1);
  }
  std::vector<OptimizerConfig> configure_optimizers() override { return {{.make = sgd()}}; }

  torch::nn::Sequential body = register_module(
      "body", torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3)));
  torch::nn::Sequential head = register_module(
      "head", torch::nn::Sequential(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 1)));
};

/// As with Lightning since 2.2.
TEST(TrainingModule, EachPartIsTrainedInTheModeThatItHas) {
  const World world = init();
  const auto module = std::make_shared<FrozenBody>();
  module->body->eval();
  Trainer trainer(world, {.max_epochs = 2});
  trainer.fit(module, RowsLoader(), RowsLoader());
  EXPECT_TRUE(at::equal(module->named_buffers()["body.1.running_mean"], at::zeros({3})));
  EXPECT_FALSE(at::equal(module->named_buffers()["head.0.running_mean"], at::zeros({3})));
  trainer.validate(module, RowsLoader());
  for (const auto& part : module->head->modules()) EXPECT_TRUE(part->is_training());
  for (const auto& part : module->body->modules()) EXPECT_FALSE(part->is_training());

  // One that was evaluated as a whole stays as it is, with a warning.
  module->eval();
  const at::Tensor mean = module->named_buffers()["head.0.running_mean"].clone();
  ::testing::internal::CaptureStderr();
  trainer.fit(module, RowsLoader());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("train()"));
  EXPECT_TRUE(at::equal(module->named_buffers()["head.0.running_mean"], mean));
  EXPECT_FALSE(module->is_training());
}

TEST(TrainingModule, NamedSumsComeBackFromACheckpointsNumbers) {
  MetricSums sums;
  sums.note("loss", 3, 4);
  sums.note("f1.score", 1.5, 2);
  const MetricSums back = MetricSums::from_values(sums.values("epoch."), "epoch.");
  EXPECT_EQ(back.values(""), sums.values(""));
  EXPECT_EQ(back.loss.sum, 3);
}

/// Only one rank sees it, in its shard.
TEST(FiniteCheck, WhatOneShardHasAllRanksAreTold) {
  run_group(3,
            [](ProcessGroup group) {
              FiniteCheck check(OnNan::stop, group);
              std::vector<at::Tensor> shard{at::ones({5})};
              EXPECT_TRUE(check.step_is_good({shard, true}, 1, 0));
              if (group.rank() == 1) {
                check.loss_is_good(std::numeric_limits<double>::infinity());
                shard[0][2] = std::numeric_limits<double>::quiet_NaN();
              }
              EXPECT_THAT(
                  [&] {
                    check.step_is_good({shard, true}, 2, 0);
                  },
                  ThrowsMessage<NumericError>(HasSubstr("inf on rank 1 at step 2")));
            },
            {.backend = "shm"});
}

TEST(FiniteCheck, AnOverflowIsTheScalersUnlessALossWasBad) {
  run_group(1, [](ProcessGroup group) {
    const std::vector<at::Tensor> bad{at::full({2}, std::numeric_limits<double>::infinity())};
    FiniteCheck check(OnNan::stop, group);
    EXPECT_TRUE(check.step_is_good({bad, false, true}, 1, 0));
    check.loss_is_good(std::numeric_limits<double>::quiet_NaN());
    EXPECT_THROW(check.step_is_good({bad, false, true}, 2, 0), NumericError);
  });
}

/// A module whose parts are given from outside, for mistakes.
struct Odd : TrainingModule<Batch> {
  std::function<at::Tensor(const Batch&)> step;
  std::vector<OptimizerConfig> optimizers{{.make = sgd()}};
  bool automatic = true;
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(784, 10));
  at::Tensor training_step(const Batch& batch, int64_t) override { return step(batch); }
  bool automatic_optimization() const override { return automatic; }
  std::vector<OptimizerConfig> configure_optimizers() override { return optimizers; }
  using TrainingModule::log;
  using TrainingModule::update;
};

void expect_refused(const std::function<void(Odd&)>& spoil, const std::string& text,
                    TrainerOptions options = {}, int ranks_of_loader = 1) {
  const World world = init();
  const auto module = std::make_shared<Odd>();
  module->step = [module = module.get()](const Batch& batch) {
    return module->layer->forward(batch.data).mean();
  };
  spoil(*module);
  EXPECT_THAT(
      [&] { Trainer(world, options).fit(module, loader_of(noise_images(16), 0, ranks_of_loader)); },
      ThrowsMessage<UsageError>(HasSubstr(text)))
      << text;
  module->step = {};
}

TEST(TrainingModule, ATensorOfTwoNamesIsOneParameter) {
  const World world = init();
  std::vector<at::Tensor> weights;
  for (const bool tied : {false, true}) {
    at::manual_seed(4);
    const auto module = std::make_shared<Odd>();
    module->step = [module = module.get()](const Batch& batch) {
      return module->layer->forward(batch.data).square().mean();
    };
    if (tied) module->layer->register_parameter("again", module->layer->weight);
    module->optimizers[0].module = module->layer.ptr();
    Trainer(world, {.max_epochs = 1}).fit(module, loader_of(noise_images(16)));
    weights.push_back(module->layer->weight.detach());
    module->step = {};
  }
  EXPECT_TRUE(at::equal(weights[0], weights[1]));
}

TEST(TrainingModule, MistakesAreNamed) {
  expect_refused([](Odd& odd) { odd.optimizers.clear(); }, "gave no optimizer");
  expect_refused([](Odd& odd) { odd.optimizers[0].make = {}; }, "without `make`");
  expect_refused([](Odd& odd) { odd.optimizers.push_back({.make = sgd(), .name = "b"}); },
                 "of which one has no name");
  expect_refused(
      [](Odd& odd) {
        odd.optimizers = {{.make = sgd(), .name = "a"}, {.make = sgd(), .name = "b"}};
      },
      "automatic optimization knows one loss");
  expect_refused(
      [](Odd& odd) {
        odd.automatic = false;
        const auto layer = odd.layer.ptr();
        odd.optimizers = {{.make = sgd(), .module = layer, .name = "a"},
                          {.make = sgd(), .module = layer, .name = "b"}};
      },
      "belongs to another optimizer, too");
  expect_refused([](Odd& odd) { odd.automatic = false; }, "accumulate_grad_batches is 2",
                 {.accumulate_grad_batches = 2});
  expect_refused([](Odd& odd) { odd.step = [](const Batch&) { return at::Tensor(); }; },
                 "is an undefined tensor");
  expect_refused(
      [](Odd& odd) {
        odd.step = [&odd](const Batch& batch) { return odd.layer->forward(batch.data); };
      },
      "has shape [8, 10], expected one number");
  expect_refused([](Odd& odd) { odd.step = [](const Batch&) { return at::ones({}); }; },
                 "does not depend on any parameter");
  expect_refused(
      [](Odd& odd) {
        odd.automatic = false;
        odd.step = [&odd](const Batch&) {
          odd.update("layr", [] { return at::Tensor(); });
          return at::Tensor();
        };
        odd.optimizers[0].name = "layer";
      },
      "did you mean 'layer'?");
  expect_refused(
      [](Odd& odd) {
        odd.automatic = false;
        odd.step = [&odd](const Batch& batch) {
          odd.update("", [&] { return odd.layer->forward(batch.data); });
          return at::Tensor();
        };
      },
      "has shape [8, 10], expected one number");
  expect_refused([](Odd&) {}, "sampler has rank 0 of 2; with strategy ddp", {}, 2);
  expect_refused([](Odd&) {}, "unknown strategy 'dpd'", {.strategy = "dpd"});
  EXPECT_THAT([] { Odd().log("loss", 1.0); },
              ThrowsMessage<UsageError>(HasSubstr("while no Trainer runs the module")));
}

}  // namespace training_module_test
}  // namespace lockstep
