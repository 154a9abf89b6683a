#include "lockstep/base/error.h"
#include "tools/lockstep/commands.h"
#include "tools/lockstep/train/train_flags.h"
#include "tools/lockstep/train/training.h"

namespace lockstep::tool {
namespace {

void add_examples(Cli& cli) {
  cli.example("lockstep train --model mlp --dataset digits --devices 2",
              "Two processes on data that need no file");
  cli.example(
      "lockstep train --model convnet --dataset mnist --data-dir data --download "
      "--devices 2 --save-weights convnet.safetensors");
  cli.example("lockstep train --checkpoint-dir run --resume auto",
              "Goes on where it was killed; the same command starts it");
  cli.example("lockstep run --nproc-per-node 2 lockstep train --model mlp",
              "Under a launcher, ours or torchrun");
}

}  // namespace

int train_command(const std::vector<std::string>& args) {
  RunConfig config;
  // Read before the flags, which win.
  std::string config_file = value_of_flag(args, "--config").value_or("");
  if (!config_file.empty()) read_config(config_file, config);
  Cli cli("lockstep train", "Trains a model over several processes.");
  add_examples(cli);
  add_flags(cli, config);
  cli.option(
      "--config", config_file,
      "Read flags from a TOML file (max-epochs = 3). Flags on the command line take precedence. "
      "The resolved configuration is saved as config.toml in --checkpoint-dir",
      "FILE");
  if (!cli.parse(args)) return 0;
  if (cli.given("--freeze") && config.freeze.empty()) {
    throw UsageError("--freeze is empty", "leave it out to train all parameters");
  }
  finish_config(config);
  choose_snapshots(config);
  std::vector<std::shared_ptr<Logger>> loggers;
  return run_ranks(
      config, "lockstep train", [&] { return train_command(args); },
      [&](const World& world, Console& console, ElasticJob* job) {
        run_training(config, world, console, job, loggers);
      });
}

}  // namespace lockstep::tool
