// `lockstep train` and `lockstep eval`.
#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>

#include "lockstep/base/cores.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/launch/error_file.h"
#include "lockstep/launch/generation_folder.h"
#include "lockstep/launch/spawn_ranks.h"
#include "lockstep/models/models.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/train/stop_signal.h"
#include "tools/lockstep/commands.h"
#include "tools/lockstep/train/make_train_task.h"
#include "tools/lockstep/train/placement.h"
#include "tools/lockstep/train/snapshots.h"
#include "tools/lockstep/train/training.h"

namespace lockstep::tool {
namespace fs = std::filesystem;
namespace {

using RankBody = std::function<void(const World&, Console&, ElasticJob*)>;

/// A variable that was left behind, or --devices in a configuration file, would surprise silently.
void tell_of_ignored_devices(const RunConfig& config, const JobEnvironment& job) {
  const int here = job.local_size > 0 ? job.local_size : job.world_size;
  // Variables that no launcher of ours or torchrun's has set may be left over, with any rank.
  const bool by_hand = job.launcher == "torchrun" && !env_string("TORCHELASTIC_RUN_ID");
  const bool ignores = config.devices != here && job.rank == 0;
  if (!by_hand && !ignores) return;
  log_warning("by its environment variables this process is rank " + std::to_string(job.rank) +
              " of " + std::to_string(job.world_size) + ", started by " + job.launcher +
              (config.devices == here
                   ? ", and waits for the others"
                   : ": --devices " + std::to_string(config.devices) + " is ignored") +
              ". Where no launcher has started it, unset them (RANK, WORLD_SIZE, ...)");
}

/// CUDA does not survive a fork.
bool is_on_cpu(const RunConfig& config) {
  return config.accelerator == "cpu" || !at::hasCUDA();
}

bool can_live_on(const RunConfig& config, const std::string& command) {
  return command == "lockstep train" && is_on_cpu(config);
}

/// Each rank has all of the state after each step.
bool has_whole_state(const RunConfig& config) {
  return config.optimizer != "lbfgs" &&
         lockstep::has_whole_state(config.strategy, strategy_options(config));
}

/// Whether this rank is of a job of several hosts whose ranks can live on.
bool is_over_hosts() {
  const auto folder = env_string(launch::kGenerationFolderVariable);
  return folder && launch::GenerationFolder(*folder).first().of_hosts;
}

/// Whether the mesh, if there is one, is one of so many ranks.
bool fits_mesh(const RunConfig& config, int ranks) {
  try {
    (void)data_share(config.strategy, strategy_options(config), 0, ranks);
    return true;
  } catch (const UsageError&) {
    return config.mesh.empty();
  }
}

/// With how many of `ranks` training goes on.
std::set<int> sizes_to_go_on_with(const RunConfig& config, int ranks) {
  // Hosts that come may have more, and --nnodes says how many go on.
  constexpr int kMostOverHosts = 4096;
  const bool over_hosts = is_over_hosts();
  if (over_hosts && !config.min_ranks && !config.global_batch_size) return {};
  const auto fewest = static_cast<int>(config.min_ranks.value_or(over_hosts ? 1 : ranks));
  if (fewest > ranks)
    throw UsageError("--min-ranks " + std::to_string(fewest) + " is more than the " +
                     counted(ranks, "rank") + " of this run");
  std::set<int> sizes{ranks};
  for (int size = fewest; size < (over_hosts ? kMostOverHosts : ranks); ++size) {
    const int64_t batches = size * config.accumulate_grad_batches;
    if (config.global_batch_size.value_or(0) % batches == 0 && fits_mesh(config, size))
      sizes.insert(size);
  }
  if (fewest < ranks && !config.mesh.empty() && *sizes.begin() == ranks)
    throw UsageError("--min-ranks " + std::to_string(fewest) + ": mesh '" + config.mesh +
                         "' is one of " + counted(ranks, "rank") + " only",
                     "give one of its dimensions the size -1, or leave --min-ranks out");
  return sizes;
}

/// True in the parent, when all ranks are done.
bool spawn_ranks(const RunConfig& config, const std::string& command,
                 const std::function<int()>& again) {
  if (config.devices == 1 && config.max_restarts == 0) return false;
  const JobEnvironment job = read_job_environment();
  if (job.started_as_rank()) {
    tell_of_ignored_devices(config, job);
  } else {
    sizes_to_go_on_with(config, static_cast<int>(config.devices));  // It checks.
    (void)data_share(config.strategy, strategy_options(config), 0,
                     static_cast<int>(config.devices));
    check_files(config);
    fetch_data(config);  // Once, and what it says is said once.
  }
  launch::SpawnCall call;
  call.name = command;
  if (command == "lockstep train")
    call.how_to_go_on =
        config.checkpoint_dir.empty()
            ? "--checkpoint-dir DIR saves what was trained, to go on from with --resume auto"
            : "the same command with --resume auto goes on from the newest checkpoint; with "
              "--max-restarts N that happens by itself";
  call.signals.push_back(SIGUSR1);  // Training saves and ends, as after TERM.
  call.recovers = can_live_on(config, command) && (config.max_restarts > 0 || config.min_ranks);
  if (config.max_restarts > 0 && !call.recovers && !config.quiet && !job.started_as_rank())
    log_info("--max-restarts: when a rank fails all start again" +
             std::string(config.checkpoint_dir.empty() ? "" : ", from the newest checkpoint") +
             ". On the CPU the others live on");
  if (is_on_cpu(config)) {
    call.body = [&] { return run_guarded(command, again); };
  }
  SpawnOptions options;
  options.max_restarts = static_cast<int>(config.max_restarts);
  if (config.shutdown_timeout) {
    options.shutdown_timeout =
        std::chrono::milliseconds(static_cast<int64_t>(*config.shutdown_timeout * 1000));
  }
  try {
    return launch::spawn_ranks(static_cast<int>(config.devices), options, call) !=
           launch::SpawnRole::worker;
  } catch (...) {
    if (!job.started_as_rank()) write_snapshot_to_disk(config);
    throw;
  }
}

/// Failures that a next generation makes good are not on record.
void run_generations(const RunConfig& config, const InitOptions& options, const RankBody& body) {
  ElasticJob job(options, sizes_to_go_on_with(config, read_job_environment().world_size));
  std::optional<StopSignal> signals;  // Also of those that come while ranks meet again.
  try {
    job.run([&](World& world) {
      if (!signals) signals.emplace();
      Console console(world.rank() == 0, config.quiet);
      try {
        body(world, console, &job);
      } catch (const GenerationEnded&) {
        throw;
      } catch (const CommError&) {
        throw;
      } catch (const std::exception& error) {
        launch::write_error_file(error);
        throw;
      }
    });
  } catch (const std::exception& error) {
    launch::write_error_file(error);
    throw;
  }
}

/// One rank for each GPU, or as ranks_for says.
int64_t devices_here(const RunConfig& config) {
  const JobEnvironment job = read_job_environment();
  if (job.started_as_rank()) return job.local_size > 0 ? job.local_size : job.world_size;
  if (config.strategy == "dp") return 1;  // One process uses them all.
  const auto gpus = config.accelerator == "cpu" ? 0 : static_cast<int64_t>(at::getNumGPUs());
  return gpus > 0 ? gpus : ranks_for(usable_cores());
}

bool may_recover(const RunConfig& config) {
  return config.min_ranks || env_int("TORCHELASTIC_MAX_RESTARTS").value_or(0) > 0;
}

/// How many steps are made again at most where those that live have not all of the state. One
/// costs some milliseconds.
constexpr int64_t kSnapshotEvery = 100;

/// Puts a number in the place of --devices auto, and checks the configuration.
void finish_config(RunConfig& config) {
  if (config.devices == kAuto) config.devices = devices_here(config);
  check_config(config);
}

/// Where ranks that live on may have lost a part of the state with another one, they go on from a
/// snapshot: asks for some if `config` asks for none.
void choose_snapshots(RunConfig& config) {
  const bool recovers = config.max_restarts > 0 || may_recover(config);
  if (recovers && is_on_cpu(config) && !has_whole_state(config) && config.snapshot_every == 0)
    config.snapshot_every = kSnapshotEvery;
}

/// Runs `body` in each rank of the job that `config` asks for, and gives the command's exit code.
/// Starts `config.devices` processes where several are wanted and no launcher has started this one
/// as a rank. What their rank 0 would check of the files is checked first. A rank is what `again`
/// does, called again in a fork of this process, or this program where forks cannot go on (see
/// launch::SpawnCall::body). `command` names it in errors. Where ranks of `lockstep train` live on
/// after another's failure, `body` is called for each generation, with the job; else that is null.
int run_ranks(const RunConfig& config, const std::string& command,
              const std::function<int()>& again, const RankBody& body) {
  // Before anything that a process of its own would make again: data, threads, the group.
  if (spawn_ranks(config, command, again)) return 0;
  if (config.quiet) set_log_level(LogLevel::warning);
  const InitOptions options = init_options(config);
  // Threads and processors, before init() makes threads.
  apply(choose_placement(config.threads, config.bind_to, read_job_environment()));
  const bool over_hosts = is_over_hosts();
  const bool recovers =
      over_hosts ? has_whole_state(config)
                 : may_recover(config) && env_string(launch::kGenerationFolderVariable).has_value();
  if (recovers && can_live_on(config, command)) {
    run_generations(config, options, body);
    return 0;
  }
  const World world = init(options);
  Console console(world.rank() == 0, config.quiet);
  try {
    body(world, console, nullptr);
  } catch (const c10::OutOfMemoryError& error) {
    const Error plain(error.what_without_backtrace(),
                      "give a smaller --batch-size, --precision bf16-mixed, or more devices with "
                      "--strategy fsdp");
    launch::write_error_file(plain);
    throw plain;
  } catch (const std::exception& error) {
    // On record before the group closes: what the other ranks say after that is a consequence.
    launch::write_error_file(error);
    throw;
  }
  return 0;
}

/// The config.toml of the run whose checkpoint or checkpoints these are; empty where there is none.
fs::path config_beside(const fs::path& weights) {
  std::error_code ignored;
  const bool is_step = fs::exists(weights / "state.json", ignored);
  const fs::path folder = is_step ? fs::absolute(weights / "..").lexically_normal() : weights;
  const fs::path path = folder / "config.toml";
  return fs::is_directory(weights, ignored) && fs::exists(path, ignored) ? path : fs::path();
}

/// The weights of a run are tested as what it has trained.
void read_trained_config(const fs::path& path, RunConfig& config) {
  if (path.empty()) return;
  read_config(path, config, {"Model and data"});
  config.limit_val_batches.reset();
  config.download = false;
}

}  // namespace

int train_command(const std::vector<std::string>& args) {
  RunConfig config;
  // Read before the flags, which win.
  std::string config_file = value_of_flag(args, "--config").value_or("");
  if (!config_file.empty()) read_config(config_file, config);
  Cli cli("lockstep train", "Trains a model over several processes.");
  cli.example("lockstep train --model mlp --dataset digits --devices 2",
              "Two processes on data that need no file");
  cli.example(
      "lockstep train --model convnet --dataset mnist --data-dir data --download "
      "--devices 2 --save-weights convnet.safetensors");
  cli.example("lockstep train --checkpoint-dir run --resume auto",
              "Goes on where it was killed; the same command starts it");
  cli.example("lockstep run --nproc-per-node 2 lockstep train --model mlp",
              "Under a launcher, ours or torchrun");
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

int eval_command(const std::vector<std::string>& args) {
  RunConfig config;
  // Read before the flags, which win.
  const fs::path trained = config_beside(value_of_flag(args, "--load-weights").value_or(""));
  read_trained_config(trained, config);
  std::string config_file = value_of_flag(args, "--config").value_or("");
  if (!config_file.empty()) read_config(config_file, config, {"Model and data", "Processes"});
  Cli cli("lockstep eval", "Tests saved weights on the held-out part of a dataset.");
  cli.example("lockstep eval --model mlp --dataset digits --load-weights mlp.safetensors");
  cli.example("lockstep eval --load-weights runs/a",
              "The newest checkpoint of a run, on the data of its config.toml");
  add_flags(cli, config, {"Model and data"});
  cli.option(
      "--load-weights", config.load_weights,
      "The weights: a safetensors or .pt file, a checkpoint's folder (step-*), or a folder of "
      "checkpoints, whose newest is taken. Without it those of a TorchScript --model. Model and "
      "dataset are by default those of the config.toml that a run has beside its checkpoints",
      "PATH");
  add_flags(cli, config, {"Processes"});
  cli.option("--config", config_file,
             "Read these flags from a TOML file of `lockstep train`, as its --config does. Other "
             "flags in it are left out",
             "FILE");
  if (!cli.parse(args)) return 0;
  finish_config(config);
  if (config.load_weights.empty() && !model_info(config.model).from_file) {
    throw UsageError("--load-weights is missing: the file whose weights to test",
                     "lockstep eval --load-weights weights.safetensors, or a checkpoint's folder");
  }
  return run_ranks(
      config, "lockstep eval", [&] { return eval_command(args); },
      [&](const World& world, Console& console, ElasticJob*) {
        if (!trained.empty())
          log_info("model " + config.model + ", dataset " + config.dataset + " (" +
                   trained.string() + ")");
        run_evaluation(config, world, console);
      });
}

}  // namespace lockstep::tool
