#include "tools/lockstep/train/training.h"

#include <ATen/Context.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <optional>
#include <utility>

#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/models/script_model.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/tool/output_file.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/fit_loop.h"
#include "lockstep/train/memory_format.h"
#include "lockstep/train/same_settings.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/weights.h"
#include "tools/lockstep/report/dashboard.h"
#include "tools/lockstep/train/make_train_task.h"
#include "tools/lockstep/train/progress.h"
#include "tools/lockstep/train/snapshots.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

OnNan policy_of(const std::string& word) {
  if (word == "skip") return OnNan::skip;
  return word == "proceed" ? OnNan::proceed : OnNan::stop;
}

TrainerOptions trainer_options(const RunConfig& config) {
  TrainerOptions options;
  options.max_epochs = config.max_epochs;
  options.accumulate_grad_batches = config.accumulate_grad_batches;
  options.gradient_clip_val = config.gradient_clip_val;
  options.limit_train_batches = config.limit_train_batches.value_or(0);
  options.limit_val_batches = config.limit_val_batches.value_or(0);
  options.log_every_n_steps = config.log_every_n_steps;
  options.on_nan = policy_of(config.on_nan);
  options.identity = identity_of(config);
  options.settings = settings_of(config);
  options.precision.precision = config.precision;
  options.precision.amp_level = config.amp_level;
  options.precision.loss_scale = config.loss_scale;
  options.strategy = config.strategy;
  options.strategy_options = strategy_options(config);
  const bool all = config.log_histograms == "all";
  options.log_histograms.weights = all || config.log_histograms == "weights";
  options.log_histograms.gradients = all || config.log_histograms == "gradients";
  options.hyperparameters = hyperparameters_of(config);
  return options;
}

/// Of --logger jsonl; empty without it.
std::string json_lines_path(const RunConfig& config) {
  return has_logger(config, "jsonl") ? fs::path(config.log_dir) / "metrics.jsonl" : fs::path();
}

/// On rank 0: the loggers that the flags ask for.
std::vector<std::shared_ptr<Logger>> make_loggers(const RunConfig& config) {
  std::vector<std::shared_ptr<Logger>> loggers;
  if (!config.metrics_file.empty())
    loggers.push_back(json_lines_logger({config.metrics_file, /*only_metrics=*/true}));
  if (has_logger(config, "jsonl")) loggers.push_back(json_lines_logger({json_lines_path(config)}));
  if (has_logger(config, "tensorboard")) loggers.push_back(tensorboard_logger(config.log_dir));
  if (has_logger(config, "prometheus")) {
    const auto [host, port] = endpoint_of("--prometheus-address", config.prometheus_address);
    loggers.push_back(prometheus_logger({host, port}));
  }
  if (has_logger(config, "mlflow")) loggers.push_back(mlflow_logger());
  if (config.dashboard) {
    const auto [host, port] = endpoint_of("--dashboard-address", config.dashboard_address);
    const std::string name = config.log_dir.empty() ? "this run" : config.log_dir;
    loggers.push_back(dashboard({host, port, json_lines_path(config), name}));
  }
  return loggers;
}

/// Throws UsageError naming the flag.
void make_folder(const std::string& flag, const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error) return;
  throw UsageError(flag + " " + folder + ": cannot make this folder: " + error.message(),
                   "choose a folder that you may write to");
}

void check_log_dir(const RunConfig& config) {
  if (config.log_dir.empty()) return;
  make_folder("--log-dir", config.log_dir);
  tool::check_output_file("--log-dir", fs::path(config.log_dir) / "metrics.jsonl", "metrics.jsonl",
                          check_json_lines);
}

void check_outputs(const RunConfig& config) {
  tool::check_output_file("--save-weights", config.save_weights, "weights.safetensors");
  tool::check_output_file("--save-best", config.save_best, "best.safetensors");
  tool::check_output_file("--save-model", config.save_model, "model.pt");
  check_weights_name("--save-weights", config.save_weights);
  check_weights_name("--save-best", config.save_best);
  tool::check_output_file("--metrics-file", config.metrics_file, "metrics.jsonl", check_json_lines);
  check_log_dir(config);
  const std::pair<const char*, std::string> files[] = {{"--save-weights", config.save_weights},
                                                       {"--save-model", config.save_model},
                                                       {"--save-best", config.save_best},
                                                       {"--metrics-file", config.metrics_file},
                                                       {"--logger jsonl", json_lines_path(config)}};
  for (const auto& [flag, file] : files) {
    for (const auto& [other_flag, other] : files) {
      if (flag == other_flag || file.empty() || other.empty()) continue;
      if (fs::weakly_canonical(file) != fs::weakly_canonical(other)) continue;
      throw UsageError(std::string(flag) + " and " + other_flag + " name the same file, " + file,
                       "each would overwrite the other's");
    }
  }
}

CheckpointFolder checkpoint_folder(const RunConfig& config) {
  return CheckpointFolder(config.checkpoint_dir, config.keep_checkpoints,
                          checkpoint_hash(config.checkpoint_hash));
}

void check_checkpoint_dir(const RunConfig& config, CheckpointFolder& folder) {
  if (config.checkpoint_dir.empty()) return;
  make_folder("--checkpoint-dir", config.checkpoint_dir);
  folder.prepare();
  const auto others = folder.list();
  if (config.resume != "none" || others.empty()) return;
  // No failure of the run, after which a launcher starts it again with --resume auto implied.
  throw UsageError("--checkpoint-dir " + config.checkpoint_dir + " holds checkpoints already (" +
                       others.front().filename().string() + ")",
                   "--resume auto goes on from the newest; a new run needs another folder");
}

void check_resume(const std::string& resume) {
  std::error_code ignored;
  if (resume == "none" || resume == "auto" || fs::is_directory(resume, ignored)) return;
  const bool is_file = fs::exists(resume, ignored);
  const auto meant = is_file ? "" : did_you_mean(resume, {"auto", "none"});
  throw UsageError(
      "--resume " + resume + ": " + (is_file ? "this is a file" : "there is no such folder") +
          "; expected auto, none, or a checkpoint's folder",
      meant.empty() ? "give the --checkpoint-dir of an earlier run, or a step-* folder in it"
                    : meant);
}

/// Into how many parts the strategy cuts the data.
int64_t shares_of(const RunConfig& config, const World& world) {
  return data_share(config.strategy, strategy_options(config), world.rank(), world.size()).size;
}

/// Prints a line about ranks, with the number of steps: where the run goes on is known by then.
class Opening : public Callback {
 public:
  Opening(std::string text, Console& console) : text_(std::move(text)), console_(console) {}
  void on_start(Trainer& trainer) override {
    console_.line(text_ + ", " + counted(trainer.total_steps(), "step") + " in " +
                  counted(trainer.options().max_epochs, "epoch"));
  }

 private:
  std::string text_;
  Console& console_;
};

void add_opening(const RunConfig& config, const ModelTask& made, Trainer& trainer,
                 Console& console) {
  const World& world = trainer.world();
  const int64_t ranks = world.size();
  console.line("model " + config.model + " (" + with_thousands(made.parameters) + " parameters" +
               (made.frozen > 0 ? ", " + with_thousands(made.frozen) + " of them frozen" : "") +
               "), dataset " + config.dataset + " (" + with_thousands(made.train_samples) +
               " samples, " + with_thousands(made.test_samples) + " held out)");
  const std::string over = ranks > 1 ? " over " + world.group().backend() : "";
  const int64_t shares = shares_of(config, world);
  trainer.add_callback(std::make_shared<Opening>(
      counted(ranks, "rank") + over + " on " + world.device().str() +
          (config.strategy == "ddp" ? "" : ", strategy " + config.strategy) + ", batch size " +
          std::to_string(config.batch_size) +
          (config.logical_shards > 0 ? " per shard, " : " per rank, ") +
          std::to_string(config.batch_size * config.accumulate_grad_batches * shares) + " a step",
      console));
}

/// The outcome of a part of the test data must not be taken for that of all of it.
void finish_output(const RunConfig& config, const World& world, const Metrics& test,
                   int64_t held_out, Console& console) {
  if (world.rank() == 0 && test.samples < held_out) {
    log_warning("tested on " + with_thousands(test.samples) + " of " +
                counted(held_out, "held-out sample") + " only, by --limit-val-batches " +
                std::to_string(config.limit_val_batches.value_or(0)));
  }
  console.result(outcome_line(test));
  if (console.closed()) throw InterruptedError(SIGPIPE);
}

/// Writes the run's configuration beside its checkpoints, when nothing keeps it from training.
class ConfigSaver : public Callback {
 public:
  explicit ConfigSaver(const RunConfig& config)
      : path_(fs::path(config.checkpoint_dir) / "config.toml"), text_(to_toml(config)) {}
  void on_start(Trainer&) override { write_file_atomically(path_, text_); }

 private:
  fs::path path_;
  std::string text_;
};

class SnapshotSaver : public Callback {
 public:
  SnapshotSaver(CheckpointFolder folder, int64_t every)
      : folder_(std::move(folder)), every_(every) {}
  void on_step(Trainer& trainer, const StepResult& result) override {
    if (result.step % every_ == 0) trainer.save_snapshot(folder_);
  }

 private:
  CheckpointFolder folder_;
  int64_t every_;
};

void add_callbacks(const RunConfig& config, Trainer& trainer, CheckpointFolder& folder,
                   Console& console) {
  if (config.early_stop_patience > 0) {
    trainer.add_callback(std::make_shared<EarlyStop>(config.early_stop_patience));
  }
  if (!config.save_best.empty()) {
    trainer.add_callback(std::make_shared<BestModel>(config.save_best));
  }
  const bool saves = !config.checkpoint_dir.empty();
  if (trainer.is_first_rank()) {
    trainer.add_callback(std::make_shared<Progress>(console));
    if (saves) trainer.add_callback(std::make_shared<ConfigSaver>(config));
  }
  if (auto snapshots = snapshot_folder(config)) {
    trainer.add_callback(
        std::make_shared<SnapshotSaver>(std::move(*snapshots), config.snapshot_every));
  }
  if (!saves) return;
  trainer.add_callback(std::make_shared<Checkpointer>(
      folder, config.checkpoint_every,
      [&console](const fs::path& latest) {
        console.line("saved " + latest.string() +
                     "; the same command with --resume auto goes on from there");
      },
      checkpoint_overlap(config.checkpoint_overlap)));
}

/// Where both runs make steps of as many samples, either flag may have said so. `config` has the
/// batch of a rank.
void adapt_batch(const RunConfig& config, int64_t shares, const CheckpointInfo& found,
                 std::map<std::string, std::string>& identity) {
  const auto in_found = [&](const char* flag) {
    const auto value = found.identity.find(flag);
    return value == found.identity.end() ? std::string("none") : value->second;
  };
  const auto whole = parse_int(in_found("--global-batch-size"));
  const auto of_each = parse_int(in_found("--batch-size"));
  const auto found_shares = found.values.find(detail::kSharesOfEpoch);
  const bool same_flag = whole.has_value() == config.global_batch_size.has_value();
  if (same_flag || !of_each || found_shares == found.values.end()) return;
  const int64_t batches = config.accumulate_grad_batches;
  const int64_t samples = whole ? *whole : *of_each * std::llround(found_shares->second) * batches;
  if (samples != config.batch_size * shares * batches) return;
  for (const char* flag : {"--global-batch-size", "--batch-size"}) identity[flag] = in_found(flag);
}

/// A snapshot where it is newer than all checkpoints. `config` has the batch of a rank.
std::optional<StoredCheckpoint> state_to_resume(const RunConfig& config, const Trainer& trainer,
                                                const CheckpointFolder& folder, bool& is_snapshot) {
  const World& world = trainer.world();
  const int64_t shares = shares_of(config, world);
  const auto load_from = [&](const CheckpointFolder& from) {
    return load_checkpoint(world.group(), config.resume, from.path().empty() ? nullptr : &from,
                           trainer.options().identity, world.device(),
                           [&](const CheckpointInfo& found, auto& identity) {
                             adapt_batch(config, shares, found, identity);
                           });
  };
  const auto snapshots = snapshot_folder(config);
  int newer = 0;
  if (snapshots && world.rank() == 0) {
    newer = config.resume == "auto" && is_newer(*snapshots, folder) ? 1 : 0;
  }
  if (snapshots) world.group().all_reduce_values(ReduceOp::max, newer);
  is_snapshot = newer != 0;
  if (!is_snapshot) return load_from(folder);
  try {
    return load_from(*snapshots);
  } catch (const DamagedCheckpointError& error) {
    is_snapshot = false;
    if (world.rank() == 0) log_warning(std::string("the snapshot is not used: ") + error.what());
    return load_from(folder);
  }
}

void tell_resumed(const char* source, const CheckpointInfo& info, Console& console) {
  console.line(
      std::string(source) + " after step " + std::to_string(info.step) + " (epoch " +
      std::to_string(info.epoch + 1) + ", after " +
      (info.samples < 0 ? counted(info.batches, "batch") : counted(info.samples, "sample")) +
      " of it)");
}

/// `config` has the batch of a rank.
void resume(const RunConfig& config, Trainer& trainer, CheckpointFolder& folder, Console& console,
            ElasticJob* job) {
  const auto kept = job ? trainer.live_on(*job) : std::nullopt;
  if (kept) return tell_resumed("resumed", *kept, console);
  bool is_snapshot = false;
  auto checkpoint = state_to_resume(config, trainer, folder, is_snapshot);
  if (!checkpoint) return;
  const CheckpointInfo info = checkpoint->info;
  trainer.restore(std::move(*checkpoint));
  tell_resumed(is_snapshot ? "resumed from a snapshot" : "resumed", info, console);
  if (info.epoch >= config.max_epochs) {
    console.line("nothing to train: all of --max-epochs " + std::to_string(config.max_epochs) +
                 " are done; testing the model as it is");
  }
}

}  // namespace

InitOptions init_options(const RunConfig& config) {
  InitOptions options;
  options.backend = config.backend;
  const bool wants_cuda = config.accelerator == "cuda" || config.accelerator == "gpu";
  if (wants_cuda && config.backend != "auto" && config.backend != "nccl") {
    throw UsageError("--accelerator " + config.accelerator + ": with --backend " + config.backend +
                         " a run computes on the CPU",
                     "leave --backend out, or use --accelerator cpu");
  }
  const int64_t cuda_devices = wants_cuda ? static_cast<int64_t>(at::getNumGPUs()) : 0;
  if (wants_cuda && cuda_devices == 0) {
    throw UsageError("--accelerator " + config.accelerator + ": there is no CUDA device here",
                     "use --accelerator cpu, or a LibTorch with CUDA and a driver that works");
  }
  if (wants_cuda && config.devices > cuda_devices) {
    throw UsageError("--devices " + std::to_string(config.devices) + ": this host has only " +
                     std::to_string(cuda_devices) + " CUDA devices");
  }
  if (config.accelerator == "cpu" && config.backend == "nccl") {
    throw UsageError("--backend nccl needs CUDA devices; --accelerator is cpu",
                     "use --backend gloo");
  }
  options.cpu_only = config.accelerator == "cpu";
  if (wants_cuda && config.backend == "auto") options.backend = "nccl";
  if (config.timeout) options.timeout = timeout_of_seconds(*config.timeout);
  return options;
}

CheckpointFolder check_files(const RunConfig& config) {
  check_outputs(config);
  check_resume(config.resume);
  if (!config.load_weights.empty()) check_weights_exist(config.load_weights);
  if (names_script_file(config.model)) expect_script_file(config.model);
  if (!config.load_optimizer.empty()) check_weights_exist(config.load_optimizer);
  CheckpointFolder folder = checkpoint_folder(config);
  check_checkpoint_dir(config, folder);
  prepare_snapshots(config);
  return folder;
}

/// Ranks have started again, or meet again: the same command goes on from what was saved.
void go_on_after_restart(RunConfig& config, bool meets_again) {
  const bool is_later = meets_again || read_job_environment().restart_count > 0;
  const auto snapshots = snapshot_folder(config);
  if (!is_later || (config.checkpoint_dir.empty() && !snapshots)) return;
  const bool has_saved =
      !checkpoint_folder(config).list().empty() || (snapshots && !snapshots->list().empty());
  if (config.resume == "none" || has_saved) config.resume = "auto";
}

/// With --global-batch-size the batch of a rank follows from their number.
RunConfig with_batch_of_rank(RunConfig config, const World& world) {
  if (!config.global_batch_size) return config;
  const int64_t batches = shares_of(config, world) * config.accumulate_grad_batches;
  if (*config.global_batch_size % batches != 0) {
    throw UsageError("--global-batch-size " + std::to_string(*config.global_batch_size) +
                         " cannot be cut into " + std::to_string(batches) + " equal batches" +
                         ", one for each rank or shard and batch of --accumulate-grad-batches",
                     "give a multiple of " + std::to_string(batches));
  }
  config.batch_size = *config.global_batch_size / batches;
  return config;
}

FitResult run_training(const RunConfig& wanted, const World& world, Console& console,
                       ElasticJob* job, std::vector<std::shared_ptr<Logger>>& loggers) {
  RunConfig config = resolved(wanted);
  const bool meets_again = job && job->generation() > 0;
  go_on_after_restart(config, meets_again);
  check_same_settings(settings_of_all_ranks(config), world.group());
  CheckpointFolder folder = world.rank() == 0 ? check_files(config) : checkpoint_folder(config);
  const RunConfig of_rank = with_batch_of_rank(config, world);
  ModelTask made = make_train_task(of_rank, world);
  config.memory_format = memory_format_name(made.memory_format);
  // After the trainer, which may still be writing.
  const std::shared_ptr<void> tidied(nullptr, [&](void*) {
    if (world.rank() == 0 && config.snapshot_every > 0) remove_old_snapshots(config);
  });
  if (world.rank() != 0) loggers.clear();  // Another process has them now.
  if (loggers.empty() && world.rank() == 0) loggers = make_loggers(config);
  TrainerOptions options = trainer_options(config);
  options.loggers = loggers;
  Trainer trainer(world, std::move(options));
  if (!meets_again) add_opening(of_rank, made, trainer, console);
  add_callbacks(config, trainer, folder, console);
  resume(of_rank, trainer, folder, console, job);
  trainer.load_optimizer(std::move(made.optimizer_state));
  const FitResult result =
      trainer.fit(made.module, std::move(made.train), std::move(made.validation));
  if (result.stopped_early) {
    console.line("stopped early: the test loss has not become lower for " +
                 counted(config.early_stop_patience, "epoch"));
  }
  if (!config.save_weights.empty()) trainer.save_weights(config.save_weights);
  if (!config.save_model.empty()) {
    const StateDict state = trainer.model_state();
    if (world.rank() == 0) save_script_model(made.module->model(), state, config.save_model);
  }
  finish_output(config, world, result.test, made.test_samples, console);
  return result;
}

Metrics run_evaluation(const RunConfig& config, const World& world, Console& console) {
  check_same_settings(settings_of_all_ranks(config), world.group());
  if (world.rank() == 0) check_files(config);
  ModelTask made = make_train_task(config, world, /*training=*/false);
  TrainerOptions options;
  options.limit_val_batches = config.limit_val_batches.value_or(0);
  const Metrics test = Trainer(world, options).validate(made.module, std::move(made.validation));
  finish_output(config, world, test, made.test_samples, console);
  return test;
}

}  // namespace lockstep
