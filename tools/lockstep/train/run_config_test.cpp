#include "tools/lockstep/train/run_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/parallel/strategies/strategies.h"

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

TEST(TrainFlags, OfAListGivenTwiceBothCount) {
  RunConfig config;
  config.freeze = "of a configuration file";
  tool::Cli cli("lockstep train", {});
  add_flags(cli, config);
  EXPECT_TRUE(cli.parse({"--freeze",
                         "a",
                         "--load-only=x",
                         "--freeze",
                         "b,c",
                         "--logger",
                         "jsonl",
                         "--load-rename",
                         "a=b",
                         "--logger",
                         "tensorboard",
                         "--load-only",
                         "y",
                         "--load-rename",
                         "c=d",
                         "--pipeline-plan",
                         "1",
                         "--pipeline-plan",
                         "2",
                         "--mesh",
                         "dp=2",
                         "--mesh",
                         "pp=2"}));
  EXPECT_EQ(config.freeze, "a,b,c");
  EXPECT_EQ(config.load_only, "x,y");
  EXPECT_EQ(config.load_rename, "a=b,c=d");
  EXPECT_EQ(config.logger, "jsonl,tensorboard");
  EXPECT_EQ(config.pipeline_plan, "1,2");
  EXPECT_EQ(config.mesh, "dp=2,pp=2");
}

TEST_F(ConfigFile, AnUnknownKeyGetsTheNearestOneWithItsLine) {
  EXPECT_THAT([&] { read("model = 'mlp'\nmax-epoch = 3\n"); },
              ThrowsMessage<UsageError>(HasSubstr(
                  "run.toml, line 2: unknown flag '--max-epoch'; did you mean '--max-epochs'?")));
}

TEST_F(ConfigFile, AWrongTypeNamesTheKeyAndWhatWasExpected) {
  const auto expect = [&](const char* text, const char* message) {
    EXPECT_THAT([&] { read(text); }, ThrowsMessage<UsageError>(HasSubstr(message))) << text;
  };
  expect("max-epochs = 'three'", "line 1: --max-epochs: 'three' is not a whole number");
  expect("max-epochs = 2.5", "--max-epochs: '2.5' is not a whole number");
  expect("lr = 'fast'", "--lr: 'fast' is not a number");
  expect("lr = true", "--lr: 'true' is not a number");
  expect("quiet = 1", "--quiet: unknown value '1'; expected one of true, false");
  expect("model = 3", "--model: unknown value '3'");
  expect("seed = 1.5", "--seed: '1.5' is not a whole number");
  expect("lr = 1\n[optimizer]\nmomentum = 3", "line 2: [optimizer] is a section");
  expect("[optimizer]\nmomentum = 3", "momentum = ...");
  expect("freeze = ['a.*', 'b.*']", "freeze = \"a.*,b.*\"");
  expect("batch-size = [1, 2]", "line 1: batch-size is a list");
}

TEST_F(ConfigFile, MayBeReadForSomeGroupsOnly) {
  write_file_atomically(path_, "model = 'convnet'\nlr = 1\ndevices = 2\nimage-size = 32\n");
  RunConfig config;
  read_config(path_, config, {"Model and data"});
  EXPECT_EQ(config.model, "convnet");
  EXPECT_EQ(config.image_size, 32);
  EXPECT_EQ(config.devices, 1);
  EXPECT_FALSE(config.lr);
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
  expect("lr = 1\nmodel = 'mpl'",
         "run.toml, line 2: --model: unknown value 'mpl'; expected one of");
  expect("lr = -1", "run.toml, line 1: --lr: '-1' is not a number of at least 0");
  expect("image-size = 5000", "line 1: --image-size: '5000' is not a whole number from 1 to 4096");
  expect("\n\nbackend = 'glo'", "line 3: --backend: unknown value 'glo'");
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

/// Of the command line.
RunConfig checked(const std::vector<std::string>& words) {
  RunConfig config;
  tool::Cli cli("lockstep train", "");
  add_flags(cli, config);
  EXPECT_TRUE(cli.parse(words));
  check_config(config);
  return config;
}

void expect_refused(const std::vector<std::string>& words, const std::string& message) {
  EXPECT_THAT([&] { checked(words); }, ThrowsMessage<UsageError>(HasSubstr(message)));
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
  EXPECT_NO_THROW(checked({}));
}

TEST(CheckConfig, UnknownWordsGetTheNearestOne) {
  expect_refused({"--model", "convnt"}, "did you mean 'convnet'?");
  expect_refused({"--dataset", "mnits"}, "did you mean 'mnist'?");
  expect_refused({"--optimizer", "adm"}, "did you mean 'adam'?");
  expect_refused({"--schedule", "cosin"}, "did you mean 'cosine'?");
  expect_refused({"--accelerator", "cdua"}, "did you mean 'cuda'?");
  expect_refused({"--on-nan", "skp"}, "did you mean 'skip'?");
  expect_refused({"--bind-to", "cores"}, "did you mean 'core'?");
  expect_refused({"--memory-format", "channel-last"}, "did you mean 'channels-last'?");
  expect_refused(
      {"--backend", "glo"},
      "--backend: unknown value 'glo'; expected one of auto, gloo, hierarchical, mpi, nccl");
  expect_refused({"--backend", "glo"}, "\n  hint: did you mean 'gloo'?");
  expect_refused({"--dataset", "imagenet"},
                 "--dataset: unknown value 'imagenet'; expected one of mnist, fashion-mnist, "
                 "cifar10, digits, random, file:PATH, text:PATH, folder:PATH");
  expect_refused({"--strategy", "dpd"}, "--strategy: unknown value 'dpd'");
  expect_refused({"--comm-hook", "fp16"}, "did you mean 'fp16_compress'?");
  expect_refused({"--history-size", "2"}, "is for --optimizer lbfgs");
  expect_refused({"--lr-gamma", "0.5"}, "is for --schedule step");
  expect_refused({"--min-lr", "0.5"},
                 "--min-lr is for --schedule cosine or linear; --schedule is constant");
  expect_refused({"--precision", "bf16-mixd"}, "did you mean 'bf16-mixed'?");
  expect_refused({"--precision", "fp16"}, "did you mean '16-mixed' or '16-true'?");
  expect_refused({"--precision", "bfloat16"}, "did you mean 'bf16-mixed' or 'bf16-true'?");
  expect_refused({"--precision", "Float32"}, "did you mean '32-true'?");
  expect_refused({"--amp-level", "O4"}, "--amp-level");
}

TEST(CheckConfig, FlagsOfAStrategyAreRefusedWithTheOthers) {
  const std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> rows{
      {{"--find-unused-parameters"}, {"ddp", "fsdp"}},
      {{"--bucket-cap-mb", "1"}, {"ddp"}},
      {{"--comm-hook", "bf16_compress"}, {"ddp"}},
      {{"--logical-shards", "2"}, {"ddp"}},
      {{"--fsdp-units", "a"}, {"fsdp"}},
      {{"--fsdp-min-unit-elements", "1"}, {"fsdp"}},
      {{"--num-micro-batches", "2"}, {"pipeline"}},
      {{"--pipeline-schedule", "gpipe"}, {"pipeline"}},
      {{"--pipeline-stages-per-rank", "2"}, {"pipeline"}},
      {{"--pipeline-plan", "a"}, {"pipeline"}},
      {{"--pipeline-balance", "time"}, {"pipeline"}},
      {{"--recompute-activations"}, {"pipeline"}},
      {{"--dp-replicas", "2"}, {"dp"}}};
  for (const auto& [flag, takers] : rows) {
    for (const std::string& strategy : strategy_names()) {
      std::vector<std::string> words = flag;
      words.insert(words.end(), {"--strategy", strategy});
      if (std::find(takers.begin(), takers.end(), strategy) == takers.end()) {
        expect_refused(words, flag.front() + " is for ");
        expect_refused(words, "--strategy is " + strategy);
      } else {  // The table of strategies knows the same.
        EXPECT_NO_THROW(data_share(strategy, strategy_options(checked(words)), 0, 1));
      }
    }
  }
}

TEST_F(ConfigFile, SetsTheOptionsOfStrategies) {
  const RunConfig plain;
  EXPECT_FALSE(strategy_options(plain).ddp);
  const StrategyOptions ddp = strategy_options(
      read("find-unused-parameters = true\nbucket_cap_mb = 2\ncomm-hook = 'fp16_compress'\n"));
  EXPECT_TRUE(ddp.ddp->find_unused_parameters);
  EXPECT_EQ(ddp.ddp->bucket_cap_mb, 2);
  EXPECT_EQ(ddp.ddp->comm_hook, CommHook::fp16_compress);
  EXPECT_FALSE(ddp.fsdp || ddp.pipeline || ddp.dp || ddp.logical_shards);
  const StrategyOptions fsdp = strategy_options(
      read("strategy = 'fsdp'\nfind-unused-parameters = true\nfsdp-units = 'a,h.*'\n"
           "fsdp-min-unit-elements = 7\n"));
  EXPECT_TRUE(fsdp.fsdp->find_unused_parameters);
  EXPECT_EQ(fsdp.fsdp->units, (std::vector<std::string>{"a", "h.*"}));
  EXPECT_EQ(fsdp.fsdp->min_unit_elements, 7);
  EXPECT_FALSE(fsdp.ddp);
  const StrategyOptions pipeline = strategy_options(
      read("num-micro-batches = 8\npipeline-schedule = 'gpipe'\npipeline-plan = 'a,b'\n"
           "pipeline-stages-per-rank = 3\npipeline-balance = 'parameters'\n"
           "recompute-activations = true\n"));
  EXPECT_EQ(pipeline.pipeline->num_micro_batches, 8);
  EXPECT_EQ(pipeline.pipeline->schedule, "gpipe");
  EXPECT_EQ(pipeline.pipeline->stages_per_rank, 3);
  EXPECT_EQ(pipeline.pipeline->plan, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(pipeline.pipeline->balance, "parameters");
  EXPECT_TRUE(pipeline.pipeline->recompute_activations);
  const StrategyOptions shards = strategy_options(read("logical-shards = 4\nseed = 9\n"));
  EXPECT_EQ(shards.logical_shards->count, 4);
  EXPECT_EQ(shards.logical_shards->seed, 9u);
  EXPECT_EQ(strategy_options(read("dp-replicas = 3\n")).dp->replicas, 3);
}

TEST(CheckConfig, AFileWithoutANameIsNoDataSet) {
  expect_refused({"--dataset", "file:"}, "--dataset file: names no file");
}

TEST(CheckConfig, RangesAndCombinationsNameTheFlag) {
  expect_refused({"--batch-size", "0"}, "--batch-size: '0' is not a whole number of at least 1");
  expect_refused({"--devices", "0"},
                 "--devices: '0' is neither auto nor a whole number from 1 to 4096");
  expect_refused({"--lr", "-0.1"}, "--lr: '-0.1' is not a number of at least 0");
  for (const char* seconds : {"0", "-1", "1e10", "inf", "nan"}) {
    expect_refused({"--timeout", seconds}, "from 0.001 to 1000000");
  }
  expect_refused({"--resume", "auto"}, "--resume auto needs --checkpoint-dir");
  expect_refused({"--checkpoint-every", "5"}, "needs --checkpoint-dir");
  expect_refused({"--resume", "somewhere", "--load-weights", "file"},
                 "--resume and --load-weights exclude each other");
  expect_refused({"--load-rename", "a.*=b.*"}, "are for --load-weights");
}

TEST(CheckConfig, WhatATorchScriptModelCannot) {
  expect_refused({"--model", "net.pt", "--strategy", "pipeline"}, "--strategy fsdp");
  EXPECT_NO_THROW(checked({"--model", "net.pt", "--save-model", "out.pt"}));
  for (const char* name : {"out.safetensors", "out"})
    expect_refused({"--model", "net.pt", "--save-model", name}, "out.pt");
}

}  // namespace run_config_test
}  // namespace lockstep
