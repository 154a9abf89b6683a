#include "tools/lockstep/train/run_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"

namespace lockstep {
namespace run_config_test {

using testing::HasSubstr;
using testing::ThrowsMessage;

class ConfigFile : public testing::Test {
 protected:
  RunConfig read(const std::string& text) {
    write_file_atomically(path_, text);
    RunConfig config;
    read_config(path_, config);
    return config;
  }
  TemporaryDirectory folder_;
  std::filesystem::path path_ = folder_.path() / "run.toml";
};

TEST_F(ConfigFile, SetsWhatItNamesAndLeavesTheRest) {
  const RunConfig config = read(
      "model = 'convnet'\nmax_epochs = 7\nlr = 1\nnesterov = true\nlimit-train-batches = 3\n"
      "seed = 12\ngradient-clip-val = 0.5\n");
  EXPECT_EQ(config.model, "convnet");
  EXPECT_EQ(config.max_epochs, 7);
  EXPECT_EQ(config.lr, 1.0);
  EXPECT_TRUE(config.nesterov);
  EXPECT_EQ(config.limit_train_batches, 3);
  EXPECT_EQ(config.seed, 12u);
  EXPECT_EQ(config.gradient_clip_val, 0.5);
  EXPECT_EQ(config.batch_size, RunConfig().batch_size);
}

TEST_F(ConfigFile, AnUnknownKeyGetsTheNearestOneWithItsLine) {
  EXPECT_THAT([&] { read("model = 'mlp'\nmax-epoch = 3\n"); },
              ThrowsMessage<UsageError>(HasSubstr(
                  "run.toml, line 2: unknown key 'max-epoch'; did you mean 'max-epochs'?")));
}

TEST_F(ConfigFile, AWrongTypeNamesTheKeyAndWhatWasExpected) {
  const auto expect = [&](const char* text, const char* message) {
    EXPECT_THAT([&] { read(text); }, ThrowsMessage<UsageError>(HasSubstr(message))) << text;
  };
  expect("max-epochs = 'three'", "line 1: max-epochs must be a whole number");
  expect("max-epochs = 2.5", "max-epochs must be a whole number");
  expect("lr = 'fast'", "lr must be a number");
  expect("lr = true", "lr must be a number");
  expect("quiet = 1", "quiet must be true or false");
  expect("model = 3", "model must be a text in quotes");
  expect("seed = 1.5", "seed must be a whole number");
  expect("[optimizer]\nlr = 3", "optimizer must be a text in quotes");
}

TEST_F(ConfigFile, WhatIsNoTomlNamesTheLine) {
  EXPECT_THAT([&] { read("model = \n"); },
              ThrowsMessage<UsageError>(testing::AllOf(
                  HasSubstr("run.toml, line 1: this is no TOML"), HasSubstr("hint:"))));
  RunConfig config;
  EXPECT_THAT([&] { read_config(folder_.path() / "none.toml", config); },
              ThrowsMessage<UsageError>(HasSubstr("none.toml")));
  EXPECT_THAT([&] { read_config(folder_.path(), config); },
              ThrowsMessage<UsageError>(HasSubstr("--config " + folder_.path().string())));
}

TEST_F(ConfigFile, OneWithoutAnEndIsNotReadForEver) {
  RunConfig config;
  EXPECT_THAT(
      [&] { read_config("/dev/zero", config); },
      ThrowsMessage<UsageError>(testing::AllOf(HasSubstr("/dev/zero has more than 1048576 bytes"),
                                               HasSubstr("it must be TOML"))));
}

TEST_F(ConfigFile, AValueThatAKeyCannotHaveNamesFileLineAndKey) {
  const auto expect = [&](const char* text, const char* message) {
    EXPECT_THAT([&] { read(text); }, ThrowsMessage<UsageError>(HasSubstr(message))) << text;
  };
  expect("lr = 1\nmodel = 'mpl'", "run.toml, line 2: model: unknown value 'mpl'; expected one of");
  expect("lr = -1", "run.toml, line 1: lr is -1; it must be at least 0");
  expect("image-size = 5000", "line 1: image-size is 5000; it must be from 1 to 4096");
  expect("\n\nbackend = 'glo'", "line 3: backend: unknown value 'glo'");
}

TEST_F(ConfigFile, SeedsAreThoseOfManualSeed) {
  RunConfig config;
  config.seed = read("seed = -1").seed;
  EXPECT_EQ(config.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(read(to_toml(config)).seed, config.seed);
}

TEST_F(ConfigFile, WhatIsSavedMakesTheSameRun) {
  RunConfig config;
  config.model = "convnet";
  config.data_dir = "a \"quoted\" \\ folder";
  config.lr = 0.1 + 0.2;
  config.momentum = 0;
  config.weight_decay = 1e-300;
  config.min_lr = 3;
  config.limit_val_batches = 5;
  config.memory_format = "channels-last";
  config.deterministic = true;
  config.timeout = 12.5;
  const RunConfig again = read(to_toml(config));
  EXPECT_EQ(to_toml(again), to_toml(config));
  EXPECT_EQ(again.data_dir, config.data_dir);
  EXPECT_EQ(again.lr, config.lr);
  EXPECT_EQ(again.weight_decay, 1e-300);
  EXPECT_FALSE(again.limit_train_batches);
  EXPECT_EQ(again.limit_val_batches, 5);
  EXPECT_EQ(again.memory_format, "channels-last");
  EXPECT_FALSE(read(to_toml(RunConfig())).weight_decay) << "adamw has a default of its own";
}

void expect_refused(const std::function<void(RunConfig&)>& change, const std::string& message) {
  RunConfig config;
  change(config);
  EXPECT_THAT([&] { check_config(config); }, ThrowsMessage<UsageError>(HasSubstr(message)));
}

TEST(SettingsOf, AreThoseThatCountInThisRun) {
  RunConfig config;
  auto settings = settings_of(resolved(config));
  EXPECT_EQ(settings.at("--lr"), "0.05");
  EXPECT_EQ(settings.at("--weight-decay"), "0.0");
  EXPECT_EQ(settings.at("--schedule"), "constant");
  EXPECT_FALSE(settings.contains("--max-epochs")) << "a constant rate goes on as it was";
  config.schedule = "cosine";
  config.optimizer = "adamw";
  settings = settings_of(resolved(config));
  EXPECT_EQ(settings.at("--max-epochs"), "5");
  EXPECT_EQ(settings.at("--min-lr"), "0.0");
  EXPECT_EQ(settings.at("--weight-decay"), "0.01");
  EXPECT_FALSE(settings.contains("--lr-gamma"));
}

TEST(SettingsOfAllRanks, AreWithoutWhatEachHostMayHaveOfItsOwn) {
  RunConfig config;
  config.data_dir = "here";
  config.dataset = "file:here";
  const auto before = settings_of_all_ranks(config);
  EXPECT_EQ(before.at("--dataset"), "file:PATH");
  EXPECT_FALSE(before.contains("--data-dir"));
  EXPECT_FALSE(before.contains("--save-weights"));
  config.save_weights = "mine.safetensors";  // Strategies gather the weights for it.
  EXPECT_EQ(settings_of_all_ranks(config).at("--save-weights"), "set");
}

TEST(CheckConfig, DefaultsAreFine) {
  EXPECT_NO_THROW(check_config(RunConfig()));
}

TEST(CheckConfig, UnknownWordsGetTheNearestOne) {
  expect_refused([](auto& c) { c.model = "convnt"; }, "did you mean 'convnet'?");
  expect_refused([](auto& c) { c.dataset = "mnits"; }, "did you mean 'mnist'?");
  expect_refused([](auto& c) { c.optimizer = "adm"; }, "did you mean 'adam'?");
  expect_refused([](auto& c) { c.schedule = "cosin"; }, "did you mean 'cosine'?");
  expect_refused([](auto& c) { c.accelerator = "cdua"; }, "did you mean 'cuda'?");
  expect_refused([](auto& c) { c.on_nan = "skp"; }, "did you mean 'skip'?");
  expect_refused([](auto& c) { c.bind_to = "cores"; }, "did you mean 'core'?");
  expect_refused([](auto& c) { c.memory_format = "channel-last"; },
                 "did you mean 'channels-last'?");
  expect_refused(
      [](auto& c) { c.backend = "glo"; },
      "--backend: unknown value 'glo'; expected one of auto, gloo, hierarchical, mpi, nccl");
  expect_refused([](auto& c) { c.backend = "glo"; }, "\n  hint: did you mean 'gloo'?");
  expect_refused([](auto& c) { c.dataset = "imagenet"; },
                 "--dataset: unknown value 'imagenet'; expected one of mnist, fashion-mnist, "
                 "cifar10, digits, random, file:PATH, text:PATH, folder:PATH");
  expect_refused([](auto& c) { c.strategy = "dpd"; }, "--strategy: unknown value 'dpd'");
  expect_refused([](auto& c) { c.num_micro_batches = 2; }, "is for --strategy pipeline");
  expect_refused([](auto& c) { c.pipeline_schedule = "gpipe"; }, "is for --strategy pipeline");
  expect_refused([](auto& c) { c.pipeline_balance = "time"; }, "is for --strategy pipeline");
  expect_refused([](auto& c) { c.dp_replicas = 2; }, "is for --strategy dp; --strategy is ddp");
  expect_refused([](auto& c) { c.history_size = 2; }, "is for --optimizer lbfgs");
  expect_refused([](auto& c) { c.lr_gamma = 0.5; }, "is for --schedule step");
  expect_refused([](auto& c) { c.min_lr = 0.5; },
                 "--min-lr is for --schedule cosine or linear; --schedule is constant");
  expect_refused([](auto& c) { c.precision = "bf16-mixd"; }, "did you mean 'bf16-mixed'?");
  expect_refused([](auto& c) { c.amp_level = "O4"; }, "--amp-level");
}

TEST(CheckConfig, AFileWithoutANameIsNoDataSet) {
  expect_refused([](auto& c) { c.dataset = "file:"; }, "--dataset file: names no file");
}

TEST(CheckConfig, RangesAndCombinationsNameTheFlag) {
  expect_refused([](auto& c) { c.batch_size = 0; }, "--batch-size is 0; it must be at least 1");
  expect_refused([](auto& c) { c.devices = 0; }, "--devices is 0");
  expect_refused([](auto& c) { c.lr = -0.1; }, "--lr is -0.1");
  for (const double seconds : {0.0, -1.0, 1e10, double(INFINITY), double(NAN)}) {
    expect_refused([seconds](auto& c) { c.timeout = seconds; }, "from 0.001 to 1000000");
  }
  expect_refused([](auto& c) { c.resume = "auto"; }, "--resume auto needs --checkpoint-dir");
  expect_refused([](auto& c) { c.checkpoint_every = 5; }, "needs --checkpoint-dir");
  expect_refused(
      [](auto& c) {
        c.resume = "somewhere";
        c.load_weights = "file";
      },
      "--resume and --load-weights exclude each other");
  expect_refused([](auto& c) { c.load_rename = "a.*=b.*"; }, "are for --load-weights");
}

TEST(CheckConfig, WhatATorchScriptModelCannot) {
  RunConfig config;
  config.model = "net.pt";
  config.save_model = "out.pt";
  EXPECT_NO_THROW(check_config(config));
  for (const char* name : {"out.safetensors", "out"}) {
    expect_refused(
        [&](auto& c) {
          c = config;
          c.save_model = name;
        },
        "out.pt");
  }
}

}  // namespace run_config_test
}  // namespace lockstep
