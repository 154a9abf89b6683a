#include "lockstep/train/trainer.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/weights.h"
#include "tests/support/small_task.h"

namespace lockstep {
namespace trainer_test {

using test::loader_of;
using test::noise_images;
using test::small_task;
using test::TrainTask;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Recorder : Callback {
  std::vector<int64_t> steps, logs, epochs;
  std::vector<double> rates;
  std::vector<Metrics> log_metrics, train_metrics;
  int64_t stop_after_epoch = -1;
  int interrupted = 0;
  std::function<void(int64_t)> at_step, at_log;
  void on_step(Trainer&, const StepResult& result) override {
    steps.push_back(result.step);
    rates.push_back(result.lr);
    if (at_step) at_step(result.step);
  }
  void on_log(Trainer&, const LogResult& result) override {
    logs.push_back(result.step.step);
    log_metrics.push_back(result.metrics);
    if (at_log) at_log(result.step.step);
  }
  void on_epoch_end(Trainer&, const EpochResult& result) override {
    epochs.push_back(result.epoch);
    train_metrics.push_back(result.train);
  }
  void on_interrupt(Trainer&, int number) override { interrupted = number; }
  bool wants_to_stop() const override {
    return !epochs.empty() && epochs.back() == stop_after_epoch;
  }
};

class TrainerTest : public ::testing::Test {
 protected:
  FitResult fit(TrainTask task, TrainerOptions options) {
    model_ = task.module;
    Trainer trainer(world_, std::move(options));
    trainer.add_callback(recorder_);
    return trainer.fit(std::move(task));
  }
  World world_ = init();
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  std::shared_ptr<TrainingModuleBase> model_;
};

TEST_F(TrainerTest, CallsBackInOrder) {
  TrainerOptions options;
  options.max_epochs = 2;
  options.log_every_n_steps = 2;
  const FitResult result = fit(small_task(), options);
  EXPECT_THAT(recorder_->steps, ::testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  EXPECT_THAT(recorder_->logs, ::testing::ElementsAre(2, 4, 5, 6, 8, 10));
  EXPECT_THAT(recorder_->epochs, ::testing::ElementsAre(0, 1));
  EXPECT_EQ(result.steps, 10);
  EXPECT_EQ(result.test.samples, 40);
  int64_t samples = 0;
  for (const Metrics& metrics : recorder_->log_metrics) samples += metrics.samples;
  EXPECT_EQ(samples, 80) << "every sample of both epochs is in exactly one log";
}

TEST_F(TrainerTest, TrainsAndTestsOnEachLogicalShardOnce) {
  const auto loaders = [] {
    std::vector<DataLoader> of_shards;
    for (int shard = 0; shard < 2; ++shard)
      of_shards.push_back(loader_of(noise_images(39), shard, 2));
    return of_shards;
  };
  ModelTrainingOptions training;
  training.optimizer.make = optimizer_factory("sgd");
  const auto module = std::make_shared<ModelTraining>(make_model("mlp"), std::move(training));
  TrainerOptions options;
  options.max_epochs = 1;
  options.strategy_options.logical_shards = LogicalShardsOptions{.count = 2};
  const FitResult result = fit(detail::train_task(module, loaders(), loaders()), options);
  EXPECT_EQ(result.steps, 3);
  EXPECT_EQ(result.test.samples, 39);
  EXPECT_EQ(recorder_->train_metrics.front().samples, 40);
  EXPECT_THROW(fit(small_task(), options), UsageError);
}

struct NotingLogger : Logger {
  std::vector<std::string> calls;
  std::vector<MetricValues> of_ranks;
  void begin(int64_t step, int64_t epochs) override {
    calls.push_back("begin " + std::to_string(step) + " " + std::to_string(epochs));
  }
  void log(int64_t step, const MetricValues& values, const std::string& split) override {
    calls.push_back(split + " " + std::to_string(step));
  }
  void log_ranks(int64_t step, const std::vector<MetricValues>& ranks) override {
    EXPECT_EQ(ranks.size(), 1);
    of_ranks.push_back(ranks.at(0));
  }
  void log_hyperparameters(const std::map<std::string, std::string>& values) override {
    calls.push_back("lr " + values.at("lr"));
  }
  void log_histogram(int64_t step, const std::string& name, const at::Tensor& values) override {
    if (!name.ends_with("weight")) return;
    calls.push_back(name.substr(0, name.find('/')) + " " + std::to_string(step));
  }
  void close(const std::string& failure) noexcept override { calls.push_back("close " + failure); }
};

TEST_F(TrainerTest, TellsItsLoggers) {
  const auto logger = std::make_shared<NotingLogger>();
  TrainerOptions options;
  options.max_epochs = 1;
  options.log_every_n_steps = 2;
  options.loggers = {logger};
  options.hyperparameters = {{"lr", "0.1"}};
  fit(small_task(), options);
  EXPECT_THAT(logger->calls, ::testing::ElementsAre("begin 0 0", "run 0", "lr 0.1", "train 2",
                                                    "train 4", "train 5", "test 5", "close "));
  ASSERT_EQ(logger->of_ranks.size(), 3);
  for (const auto& [name, value] : logger->of_ranks.front()) EXPECT_GE(value, 0) << name;
}

TEST_F(TrainerTest, GivesHistogramsOfGradientsBeforeTheStepAndOfWeightsAfterIt) {
  const auto logger = std::make_shared<NotingLogger>();
  TrainerOptions options;
  options.max_epochs = 1;
  options.limit_train_batches = 1;
  options.log_every_n_steps = 1;
  options.loggers = {logger};
  options.log_histograms = {.weights = true, .gradients = true};
  recorder_->at_step = [](int64_t) { throw NumericError("it ends here"); };
  EXPECT_THROW(fit(small_task(), options), NumericError);
  std::vector<std::string> without_repeats = logger->calls;
  without_repeats.erase(std::unique(without_repeats.begin(), without_repeats.end()),
                        without_repeats.end());
  EXPECT_THAT(without_repeats,
              ::testing::ElementsAre("begin 0 0", "run 0", "gradients 1", "train 1", "weights 1",
                                     "close it ends here"));
}

TEST_F(TrainerTest, AccumulationMakesFewerStepsAndAShortLastOne) {
  TrainerOptions options;
  options.max_epochs = 1;
  options.accumulate_grad_batches = 2;
  EXPECT_EQ(fit(small_task(), options).steps, 3);
}

TEST_F(TrainerTest, ACallbackCanEndTheRun) {
  recorder_->stop_after_epoch = 1;
  TrainerOptions options;
  options.max_epochs = 9;
  const FitResult result = fit(small_task(), options);
  EXPECT_EQ(result.epochs, 2);
  EXPECT_TRUE(result.stopped_early);
}

TEST_F(TrainerTest, ASignalEndsTheRunAtTheNextStep) {
  recorder_->at_step = [](int64_t step) {
    if (step == 3) ::raise(SIGTERM);
  };
  EXPECT_THROW(fit(small_task(), {}), InterruptedError);
  EXPECT_EQ(recorder_->steps.back(), 3);
  EXPECT_EQ(recorder_->interrupted, SIGTERM);
}

/// The last log of an epoch comes right before its evaluation.
TEST_F(TrainerTest, ASignalEndsAnEvaluationAndTheEpochIsFinishedAfterAResume) {
  TrainerOptions options;
  options.max_epochs = 2;
  options.log_every_n_steps = 2;
  fit(small_task(), options);
  const auto expected = recorder_->train_metrics;
  TemporaryDirectory folder;
  recorder_ = std::make_shared<Recorder>();
  recorder_->at_log = [](int64_t step) {
    if (step == 5) ::raise(SIGTERM);
  };
  {
    Trainer trainer(world_, options);
    trainer.add_callback(recorder_);
    trainer.add_callback(std::make_shared<Checkpointer>(CheckpointFolder(folder.path()), 0));
    EXPECT_THROW(trainer.fit(small_task()), InterruptedError);
  }
  EXPECT_TRUE(recorder_->epochs.empty()) << "the evaluation went on to its end";
  EXPECT_EQ(recorder_->interrupted, SIGTERM);

  recorder_ = std::make_shared<Recorder>();
  CheckpointFolder checkpoints(folder.path());
  Trainer trainer(world_, options);
  trainer.add_callback(recorder_);
  trainer.restore(*load_checkpoint(world_.group(), "auto", &checkpoints, trainer.options().identity,
                                   c10::kCPU));
  trainer.fit(small_task());
  EXPECT_THAT(recorder_->steps, ::testing::ElementsAre(6, 7, 8, 9, 10));
  EXPECT_THAT(recorder_->epochs, ::testing::ElementsAre(0, 1));
  for (size_t epoch = 0; epoch < 2; ++epoch) {
    EXPECT_EQ(recorder_->train_metrics[epoch].samples, 40);
    EXPECT_EQ(recorder_->train_metrics[epoch].loss, expected[epoch].loss);
  }
}

TEST_F(TrainerTest, TheNumberOfStepsIsKnownFromTheStart) {
  struct Asker : Callback {
    std::vector<int64_t> told;
    void on_start(Trainer& trainer) override { told.push_back(trainer.total_steps()); }
    void on_step(Trainer& trainer, const StepResult& result) override {
      told.push_back(trainer.total_steps());
      told.push_back(result.total_steps);
    }
    void on_epoch_end(Trainer& trainer, const EpochResult&) override { on_start(trainer); }
  };
  const auto asker = std::make_shared<Asker>();
  TrainerOptions options;
  options.max_epochs = 2;
  options.accumulate_grad_batches = 2;
  Trainer trainer(world_, options);
  trainer.add_callback(asker);
  trainer.fit(small_task());
  EXPECT_THAT(asker->told, ::testing::AllOf(::testing::SizeIs(15), ::testing::Each(6)));
}

TEST_F(TrainerTest, ProgressIsPrinted) {
  TrainerOptions options;
  options.max_epochs = 2;
  options.log_every_n_steps = 3;
  std::vector<std::string> lines;
  Trainer trainer(world_, options);
  trainer.add_callback(
      std::make_shared<PrintProgress>([&](const std::string& line) { lines.push_back(line); }));
  trainer.fit(small_task());
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_THAT(lines[0], ::testing::MatchesRegex("epoch 1/2  step 3/10  loss [0-9.]+  accuracy "
                                                "[0-9.]+  lr 0.001  [0-9]+ samples/s"));
  EXPECT_THAT(lines[1], ::testing::MatchesRegex("epoch 1/2  train loss [0-9.]+  accuracy [0-9.]+  "
                                                "test loss [0-9.]+  accuracy [0-9.]+  [0-9]+ "
                                                "samples/s  .*s"));
  EXPECT_THAT(lines[2], HasSubstr("epoch 2/2  step 6/10"));
  EXPECT_THAT(lines[4], HasSubstr("epoch 2/2  train loss"));
}

TEST_F(TrainerTest, ProgressHasTheMetricsThatAModuleLogs) {
  std::vector<std::string> lines;
  PrintProgress progress([&](const std::string& line) { lines.push_back(line); });
  Trainer trainer(world_, {});
  EpochResult result;
  result.max_epochs = 1;
  result.train.values = {{"d_loss", 0.25}, {"g_loss", 2}};
  result.test.samples = 10;
  result.test.accuracy = 0.5;
  progress.on_epoch_end(trainer, result);
  result.train = {};
  result.test = {};
  progress.on_epoch_end(trainer, result);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], HasSubstr("  train d_loss 0.2500  g_loss 2.0000  test accuracy 0.5000  "));
  EXPECT_THAT(lines[1], HasSubstr("  train loss nan  0 samples/s"));
}

TEST_F(TrainerTest, TheScheduleSpansTheRun) {
  TrainerOptions options;
  options.max_epochs = 2;
  fit(small_task("mlp", noise_images(40), 0, 1, {.name = "linear"}), options);
  EXPECT_DOUBLE_EQ(recorder_->rates.front(), 0.001);
  EXPECT_GT(recorder_->rates[8], recorder_->rates[9]);
  EXPECT_GT(recorder_->rates[9], 0);
}

TEST_F(TrainerTest, OptionsOutOfRangeAreNamed) {
  TrainerOptions options;
  options.log_every_n_steps = 0;
  EXPECT_THAT([&] { fit(small_task(), options); },
              ThrowsMessage<UsageError>(HasSubstr("log_every_n_steps is 0")));
}

/// One sample that makes the loss of its batch NaN.
TensorDataset with_a_nan() {
  TensorDataset dataset = noise_images(40);
  dataset.data[17][0] = std::numeric_limits<float>::quiet_NaN();
  return dataset;
}

TEST_F(TrainerTest, ANanStopsWithItsStepAndRank) {
  EXPECT_THAT([&] { fit(small_task("mlp", with_a_nan()), {}); },
              ThrowsMessage<NumericError>(::testing::ContainsRegex(
                  "the loss is nan on rank 0 at step [1-5] \\(epoch 1\\)")));
  for (const at::Tensor& parameter : model_->parameters()) {
    EXPECT_TRUE(std::isfinite(parameter.sum().item<double>())) << "the weights were not touched";
  }
}

TEST_F(TrainerTest, ANanCanBeSkipped) {
  TrainerOptions options;
  options.on_nan = OnNan::skip;
  options.max_epochs = 2;
  options.log_every_n_steps = 5;
  EXPECT_EQ(fit(small_task("mlp", with_a_nan()), options).steps, 10);
  for (const at::Tensor& parameter : model_->parameters()) {
    EXPECT_TRUE(std::isfinite(parameter.sum().item<double>()));
  }
  for (const Metrics& metrics : recorder_->log_metrics) {
    EXPECT_TRUE(std::isfinite(metrics.loss)) << "the steps that were made have a loss";
    EXPECT_EQ(metrics.samples, 40);
  }
}

/// Batch norm's statistics have seen the NaN.
TEST_F(TrainerTest, AModelWithStatisticsIsSoundAfterASkippedStep) {
  for (const char* model : {"convnet", "fashion-cnn"}) {
    TrainTask task = small_task(model, with_a_nan());
    task.validation = small_task(model, noise_images(16)).validation;
    TrainerOptions options;
    options.on_nan = OnNan::skip;
    options.max_epochs = 2;
    EXPECT_TRUE(std::isfinite(fit(std::move(task), options).test.loss)) << model;
  }
}

TEST_F(TrainerTest, OfManySkippedStepsAFewAreToldAndTheRestCounted) {
  TrainerOptions options;
  options.on_nan = OnNan::skip;
  options.max_epochs = 9;
  ::testing::internal::CaptureStderr();
  fit(small_task("mlp", with_a_nan()), options);
  const std::string told = ::testing::internal::GetCapturedStderr();
  const auto count = [&](const std::string& text) {
    int found = 0;
    for (size_t at = told.find(text); at != told.npos; at = told.find(text, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("the step is skipped on all ranks"), 3) << told;
  EXPECT_EQ(count("1 of 5 steps skipped"), 6) << told;
}

TEST_F(TrainerTest, ARunThatSkipsEveryStepIsNoSuccess) {
  TensorDataset dataset = noise_images(40);
  dataset.data.fill_(std::numeric_limits<float>::quiet_NaN());
  TrainerOptions options;
  options.on_nan = OnNan::skip;
  EXPECT_THAT([&] { fit(small_task("mlp", dataset), options); },
              ThrowsMessage<NumericError>(::testing::AllOf(
                  HasSubstr("every step of epoch 1 was skipped (5)"), HasSubstr("hint:"))));
}

TEST_F(TrainerTest, ANanCanBeIgnored) {
  TrainerOptions options;
  options.on_nan = OnNan::proceed;
  options.max_epochs = 1;
  EXPECT_EQ(fit(small_task("mlp", with_a_nan()), options).steps, 5);
  EXPECT_TRUE(std::isnan(model_->parameters().back().sum().item<double>()));
}

TEST_F(TrainerTest, AnInfiniteLossIsNoticedThoughItsGradientsMayBeFinite) {
  TensorDataset dataset = noise_images(40);
  dataset.data[17].fill_(3e38f);
  EXPECT_THROW(fit(small_task("mlp", dataset), {}), NumericError);
}

TEST_F(TrainerTest, GoesOnFromACheckpointToTheSameBits) {
  for (const int64_t every : {1, 2}) {
    TrainerOptions options;
    options.max_epochs = 3;
    options.accumulate_grad_batches = every;
    const auto task_of_run = [] {
      return small_task("fashion-cnn", noise_images(40), 0, 1, {.name = "cosine"});
    };
    fit(task_of_run(), options);
    const StateDict expected = state_dict(*model_);
    const int64_t steps = recorder_->steps.size();
    for (int64_t step = 1; step <= steps; ++step) {
      TemporaryDirectory folder;
      CheckpointFolder checkpoints(folder.path());
      {
        Trainer trainer(world_, options);
        auto saver = std::make_shared<Recorder>();
        saver->at_step = [&](int64_t now) {
          if (now != step) return;
          trainer.save(checkpoints);
          ::raise(SIGINT);
        };
        trainer.add_callback(saver);
        EXPECT_THROW(trainer.fit(task_of_run()), InterruptedError);
      }
      at::rand({17});  // whatever happened since then must not matter
      TrainTask task = task_of_run();
      const auto model = task.module;
      Trainer trainer(world_, options);
      trainer.restore(*load_checkpoint(world_.group(), "auto", &checkpoints,
                                       trainer.options().identity, c10::kCPU));
      trainer.fit(std::move(task));
      const StateDict found = state_dict(*model);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(at::equal(found[i].second, expected[i].second))
            << expected[i].first << " after resuming at step " << step;
      }
    }
    recorder_ = std::make_shared<Recorder>();
  }
}

/// Saves a checkpoint in the folder before the first step.
void save_untrained(const World& world, const TrainerOptions& options,
                    const CheckpointFolder& folder) {
  TrainerOptions untrained = options;
  untrained.max_epochs = 0;
  Trainer trainer(world, untrained);
  trainer.fit(small_task("mlp"));
  CheckpointFolder checkpoints = folder;
  trainer.save(checkpoints);
}

TEST_F(TrainerTest, OtherSettingsAreToldWhereARunGoesOn) {
  TemporaryDirectory folder;
  CheckpointFolder checkpoints(folder.path());
  TrainerOptions options;
  options.settings = {{"lr", "0.1"}, {"schedule", "step"}};
  save_untrained(world_, options, checkpoints);
  const auto told = [&] {
    Trainer trainer(world_, options);
    const auto checkpoint = load_checkpoint(world_.group(), "auto", &checkpoints,
                                            trainer.options().identity, c10::kCPU);
    ::testing::internal::CaptureStderr();
    trainer.restore(*checkpoint);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(told(), "");
  options.settings["lr"] = "0.2";
  EXPECT_THAT(told(), HasSubstr("other settings: lr '0.1' in the checkpoint, '0.2' in this run;"));
}

TEST_F(TrainerTest, EachFitIsARunOfItsOwn) {
  Trainer trainer(world_, {.max_epochs = 1});
  trainer.add_callback(recorder_);
  EXPECT_EQ(trainer.fit(small_task()).steps, 5);
  const StateDict first = trainer.model_state();
  EXPECT_EQ(trainer.fit(small_task()).steps, 5);
  EXPECT_THAT(recorder_->steps, ::testing::ElementsAre(1, 2, 3, 4, 5, 1, 2, 3, 4, 5));
  const StateDict second = trainer.model_state();
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(at::equal(first[i].second, second[i].second)) << first[i].first;
  }
}

TEST_F(TrainerTest, ValidatesAModuleAsItIsAndAsItWasTrained) {
  Trainer trainer(world_, {.max_epochs = 1});
  TrainTask task = small_task("convnet", noise_images(40));
  const auto module = std::dynamic_pointer_cast<ModelTraining>(task.module);
  const auto data = [] { return loader_of(noise_images(40)); };
  const Metrics untrained = trainer.validate(module, data());
  EXPECT_EQ(untrained.samples, 40);
  const FitResult result = trainer.fit(std::move(task));
  const Metrics trained = trainer.validate(module, data());
  EXPECT_EQ(trained.loss, result.test.loss);
  EXPECT_EQ(trained.accuracy, result.test.accuracy);
  EXPECT_NE(trained.loss, untrained.loss);
  EXPECT_THROW(trainer.validate(module, loader_of(noise_images(40), 0, 2)), UsageError)
      << "half of the data";
}

TEST_F(TrainerTest, WhatNeedsAFitSaysSoBeforeOne) {
  Trainer trainer(world_);
  EXPECT_THROW(trainer.model_state(), UsageError);
  EXPECT_THROW(trainer.global_step(), UsageError);
}

TEST_F(TrainerTest, ARunThatGoesOnSetsLaterCheckpointsAside) {
  TemporaryDirectory folder;
  CheckpointFolder checkpoints(folder.path());
  const TrainerOptions options{.max_epochs = 2};
  {
    Trainer trainer(world_, options);
    trainer.add_callback(std::make_shared<Checkpointer>(checkpoints, 0));
    trainer.fit(small_task());
  }
  const auto resumed = folder.path() / "step-00000005";
  Trainer trainer(world_, options);
  trainer.restore(*load_checkpoint(world_.group(), resumed.string(), nullptr,
                                   trainer.options().identity, c10::kCPU));
  trainer.add_callback(std::make_shared<Checkpointer>(checkpoints, 0));
  trainer.fit(small_task());
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "superseded-step-00000010"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "step-00000010"));
}

TEST_F(TrainerTest, ACheckpointOfAnotherModelIsRefusedWithBothNames) {
  TemporaryDirectory folder;
  CheckpointFolder checkpoints(folder.path());
  TrainerOptions options;
  options.identity = {{"model", "mlp"}};
  save_untrained(world_, options, checkpoints);
  options.identity = {{"model", "wide"}};
  const Trainer other(world_, options);
  EXPECT_THAT(
      [&] {
        load_checkpoint(world_.group(), "auto", &checkpoints, other.options().identity, c10::kCPU);
      },
      ThrowsMessage<CheckpointError>(
          HasSubstr("model 'mlp' in the checkpoint, 'wide' in this run")));
}

}  // namespace trainer_test
}  // namespace lockstep
