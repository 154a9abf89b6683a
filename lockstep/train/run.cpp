#include "lockstep/train/run.h"

#include <ATen/Context.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/collective.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/metrics_file.h"
#include "lockstep/train/progress.h"
#include "lockstep/train/task.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/weights.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

int64_t cuda_devices() {
  return at::hasCUDA() ? static_cast<int64_t>(at::getNumGPUs()) : 0;
}

OnNan policy_of(const std::string& word) {
  if (word == "skip") return OnNan::skip;
  return word == "proceed" ? OnNan::proceed : OnNan::stop;
}

/// What must be the same for a resumed run to go on as the one before would have.
std::map<std::string, std::string> identity_of(const RunConfig& config) {
  return {{"model", config.model},
          {"dataset", config.dataset},
          {"batch_size", std::to_string(config.batch_size)},
          {"accumulate_grad_batches", std::to_string(config.accumulate_grad_batches)},
          {"limit_train_batches", std::to_string(config.limit_train_batches.value_or(0))},
          {"optimizer", config.optimizer},
          {"seed", std::to_string(config.seed)}};
}

TrainerOptions trainer_options(const RunConfig& config, const TrainTask& task) {
  TrainerOptions options;
  options.max_epochs = config.max_epochs;
  options.accumulate_grad_batches = config.accumulate_grad_batches;
  options.gradient_clip_val = config.gradient_clip_val;
  options.limit_train_batches = config.limit_train_batches.value_or(0);
  options.limit_test_batches = config.limit_test_batches.value_or(0);
  options.log_every_n_steps = config.log_every_n_steps;
  options.on_nan = policy_of(config.on_nan);
  options.identity = identity_of(config);
  const int64_t all = task.train->batches_per_epoch();
  const int64_t batches = std::min(all, config.limit_train_batches.value_or(all));
  const int64_t steps =
      (batches + config.accumulate_grad_batches - 1) / config.accumulate_grad_batches;
  options.schedule.name = config.schedule;
  options.schedule.warmup_steps = config.warmup_steps;
  options.schedule.total_steps = steps * config.max_epochs;
  options.schedule.step_size = steps * config.lr_step_size;
  options.schedule.gamma = config.lr_gamma;
  options.schedule.min_lr = config.min_lr;
  return options;
}

/// Hours of training must not be lost to a folder that was mistyped.
void check_can_write(const char* flag, const std::string& file) {
  if (file.empty()) return;
  const fs::path path(file);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const std::string what = std::string(flag) + " " + file + ": ";
  if (!fs::is_directory(folder)) {
    throw UsageError(what + "there is no folder " + folder.string());
  }
  if (fs::is_directory(path)) throw UsageError(what + "this is a folder; a file's name is needed");
  if (::access(folder.c_str(), W_OK) != 0) {
    throw SystemError(what + "cannot write to folder " + folder.string(), errno);
  }
}

std::string with_thousands(int64_t number) {
  std::string text = std::to_string(number);
  for (auto i = static_cast<int64_t>(text.size()) - 3; i > 0; i -= 3) {
    text.insert(static_cast<size_t>(i), ",");
  }
  return text;
}

void print_opening(const RunConfig& config, const World& world, const TrainTask& task,
                   int64_t steps, Console& console) {
  int64_t parameters = 0;
  for (const at::Tensor& parameter : task.model->parameters()) parameters += parameter.numel();
  const int64_t ranks = world.size();
  console.line("model " + config.model + " (" + with_thousands(parameters) +
               " parameters), dataset " + config.dataset + " (" +
               with_thousands(task.train->sampler().options().dataset_size) + " samples, " +
               with_thousands(task.test->sampler().options().dataset_size) + " held out)");
  console.line(std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks") + " over " +
               world.group().backend() + " on " + world.device().str() + ", batch size " +
               std::to_string(config.batch_size) + " a rank, " +
               std::to_string(config.batch_size * config.accumulate_grad_batches * ranks) +
               " a step, " + with_thousands(steps) + " steps in " +
               std::to_string(config.max_epochs) + " epochs");
}

void finish_output(const Metrics& test, Console& console) {
  console.result(outcome_line(test));
  if (console.closed()) throw InterruptedError(SIGPIPE);
}

/// Makes sure that the run's checkpoints are the newest in their folder.
void take_over(CheckpointFolder& folder, const std::optional<Checkpoint>& resumed) {
  if (resumed) return folder.supersede_after(resumed->info.step);
  const auto others = folder.list();
  if (others.empty()) return;
  throw CheckpointError("--checkpoint-dir " + folder.path().string() +
                            " holds checkpoints of another run already (" +
                            others.front().filename().string() + ")",
                        "--resume auto goes on with that run; a new one needs another folder");
}

/// Resumes, and prepares what is written beside training.
void attach(const RunConfig& config, const World& world, Trainer& trainer, c10::Device device,
            Console& console) {
  if (config.early_stop_patience > 0) {
    trainer.add_callback(std::make_shared<EarlyStop>(config.early_stop_patience));
  }
  if (!config.save_best.empty()) {
    trainer.add_callback(std::make_shared<BestModel>(config.save_best));
  }
  CheckpointFolder folder(config.checkpoint_dir, config.keep_checkpoints);
  const bool saves = !config.checkpoint_dir.empty();
  const auto checkpoint = load_checkpoint(world.group(), config.resume, saves ? &folder : nullptr,
                                          trainer.options().identity, device);
  if (checkpoint) {
    trainer.restore(*checkpoint);
    console.line("resumed after step " + std::to_string(checkpoint->info.step) + " (epoch " +
                 std::to_string(checkpoint->info.epoch + 1) + ", batch " +
                 std::to_string(checkpoint->info.batches) + ")");
  }
  if (trainer.is_first_rank()) {
    trainer.add_callback(std::make_shared<Progress>(console));
    if (!config.metrics_file.empty()) {
      trainer.add_callback(std::make_shared<MetricsFile>(
          config.metrics_file, checkpoint.has_value(), checkpoint ? checkpoint->info.step : 0,
          checkpoint ? checkpoint->info.epoch : 0));
    }
  }
  if (!saves) return;
  if (trainer.is_first_rank()) {
    folder.prepare();
    take_over(folder, checkpoint);
    write_file_atomically(fs::path(config.checkpoint_dir) / "config.toml", to_toml(config));
  }
  trainer.add_callback(std::make_shared<Checkpointer>(folder, config.checkpoint_every, console));
}

RunConfig resolved(RunConfig config) {
  config.lr = config.lr.value_or(default_lr(config.optimizer, config.model));
  config.momentum = config.momentum.value_or(default_momentum(config.optimizer));
  return config;
}

}  // namespace

InitOptions init_options(const RunConfig& config) {
  InitOptions options;
  options.backend = config.backend;
  const bool wants_cuda = config.accelerator == "cuda" || config.accelerator == "gpu";
  if (wants_cuda && cuda_devices() == 0) {
    throw UsageError("--accelerator " + config.accelerator + ": there is no CUDA device here",
                     "use --accelerator cpu, or a LibTorch with CUDA and a driver that works");
  }
  if (wants_cuda && config.devices > cuda_devices()) {
    throw UsageError("--devices " + std::to_string(config.devices) + ": this host has only " +
                     std::to_string(cuda_devices()) + " CUDA devices");
  }
  if (config.accelerator == "cpu" && config.backend == "nccl") {
    throw UsageError("--backend nccl needs CUDA devices; --accelerator is cpu",
                     "use --backend gloo");
  }
  if (config.accelerator == "cpu" && config.backend == "auto") options.backend = "gloo";
  if (wants_cuda && config.backend == "auto") options.backend = "nccl";
  if (config.timeout) {
    options.timeout = std::chrono::milliseconds(std::llround(*config.timeout * 1000));
  }
  return options;
}

FitResult run_training(const RunConfig& wanted, const World& world, Console& console) {
  const RunConfig config = resolved(wanted);
  if (world.rank() == 0) {
    check_can_write("--save-weights", config.save_weights);
    check_can_write("--save-best", config.save_best);
    check_can_write("--metrics-file", config.metrics_file);
  }
  TrainTask task = make_train_task(config, world);
  const c10::Device device = task.device;
  const TrainerOptions options = trainer_options(config, task);
  print_opening(config, world, task, options.schedule.total_steps, console);
  Trainer trainer(world, std::move(task), options);
  attach(config, world, trainer, device, console);
  const FitResult result = trainer.fit();
  if (result.stopped_early) {
    console.line("stopped early: the test loss has not become lower for " +
                 std::to_string(config.early_stop_patience) + " epochs");
  }
  if (world.rank() == 0 && !config.save_weights.empty()) {
    save_weights(trainer.model(), config.save_weights);
  }
  finish_output(result.test, console);
  return result;
}

Metrics run_evaluation(const RunConfig& config, const World& world, Console& console) {
  TrainTask task = make_evaluation_task(config, world);
  const Metrics test = evaluate(*task.model, task.loss, *task.test, world.group(), task.device,
                                config.limit_test_batches.value_or(0));
  finish_output(test, console);
  return test;
}

}  // namespace lockstep
