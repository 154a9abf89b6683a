#include "lockstep/base/error.h"
#include "lockstep/models/models.h"
#include "tools/lockstep/commands.h"
#include "tools/lockstep/train/train_flags.h"
#include "tools/lockstep/train/training.h"

namespace lockstep::tool {

int eval_command(const std::vector<std::string>& args) {
  RunConfig config;
  Cli cli("lockstep eval", "Tests saved weights on the held-out part of a dataset.");
  cli.example("lockstep eval --model mlp --dataset digits --load-weights mlp.safetensors");
  cli.example("lockstep eval --model mlp --load-weights runs/a", "The newest checkpoint of a run");
  add_flags(cli, config, {"Model and data"});
  cli.option(
      "--load-weights", config.load_weights,
      "The weights: a safetensors or .pt file, a checkpoint's folder (step-*), or a folder of "
      "checkpoints, whose newest is taken. Without it those of a TorchScript --model",
      "PATH");
  add_flags(cli, config, {"Processes"});
  if (!cli.parse(args)) return 0;
  finish_config(config);
  if (config.load_weights.empty() && !model_info(config.model).from_file) {
    throw UsageError("--load-weights is missing: the file whose weights to test",
                     "lockstep eval --load-weights weights.safetensors, or a checkpoint's folder");
  }
  return run_ranks(
      config, "lockstep eval", [&] { return eval_command(args); },
      [&](const World& world, Console& console, ElasticJob*) {
        run_evaluation(config, world, console);
      });
}

}  // namespace lockstep::tool
