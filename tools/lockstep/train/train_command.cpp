#include <exception>

#include "lockstep/base/log.h"
#include "lockstep/launch/error_file.h"
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

int train_rank(const RunConfig& config) {
  if (config.quiet) set_log_level(LogLevel::warning);
  const InitOptions options = init_options(config);
  place_rank(config);
  const World world = init(options);
  Console console(world.rank() == 0, config.quiet);
  try {
    run_training(config, world, console);
  } catch (const std::exception& error) {
    // On record before the group closes: what the other ranks say after that is a consequence.
    launch::write_error_file(error);
    throw;
  }
  return 0;
}

}  // namespace

int train_command(const std::vector<std::string>& args) {
  RunConfig config;
  std::string config_file = config_file_in(args);
  if (!config_file.empty()) read_config(config_file, config);
  Cli cli("lockstep train", "Trains a model over several processes.");
  add_examples(cli);
  add_flags(cli, config, {"Model and data", "Processes", "Training", "Files", "Output"});
  cli.option("--config", config_file,
             "Read flags from a TOML file (max-epochs = 3); those on the command line win. "
             "--checkpoint-dir gets the resolved one as config.toml",
             "FILE");
  if (!cli.parse(args)) return 0;
  check_config(config);
  // Before anything that a process of its own would make again: data, threads, the group.
  if (spawn_ranks(config, "lockstep train", [&] { return train_command(args); })) return 0;
  return train_rank(config);
}

}  // namespace lockstep::tool
