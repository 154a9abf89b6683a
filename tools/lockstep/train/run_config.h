#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// Everything that `lockstep train` can be told. Each field is a flag and a key of a configuration
/// file, with the same name (max_epochs is --max-epochs).
struct RunConfig {
  // What is trained on what.
  std::string model = "mlp";
  std::string dataset = "digits";  ///< Needs neither a file nor the network.
  std::string data_dir;            ///< Empty: LOCKSTEP_DATA_DIR, else "data".
  bool download = false;           ///< A job must not reach out to the network unasked.
  int64_t image_size = 224;        ///< Of folder: data sets. ImageNet's models are made for it.
  bool augment = false;            ///< Off, so that runs compare. Training images vary with it.

  // Where.
  int64_t devices = 1;
  std::string accelerator = "auto";  ///< cuda when there is a device for every process, else cpu.
  std::string strategy = "ddp";
  std::string mesh;                          ///< Named dimensions of the ranks; empty: one.
  std::optional<int64_t> num_micro_batches;  ///< Unset: see StrategyOptions, as the next.
  std::string pipeline_schedule;             ///< Empty: unset.
  int64_t pipeline_stages_per_rank = 0;      ///< See StrategyOptions, as the next two.
  std::string pipeline_plan;                 ///< Names with commas between.
  std::string pipeline_balance;              ///< Empty: by time.
  bool recompute_activations = false;
  std::optional<int64_t> dp_replicas;  ///< Unset: see StrategyOptions.
  std::string precision = "32-true";   ///< These three: see PrecisionOptions.
  std::string amp_level;
  std::string loss_scale;
  std::string backend = "auto";
  std::optional<int64_t> threads;  ///< Unset: see choose_threads.
  std::string bind_to = "auto";    ///< See launch::choose_binding.
  /// Of images and convolutions; auto: see memory_format_of. contiguous gives Python's bits.
  std::string memory_format = "auto";
  int64_t num_workers = 0;        ///< Gathering from memory costs less than handing over.
  std::optional<double> timeout;  ///< Seconds; unset: LOCKSTEP_TIMEOUT, else 120.

  // How.
  int64_t max_epochs = 5;
  int64_t batch_size = 64;  ///< Of each process, as in a PyTorch script.
  std::string optimizer = "sgd";
  std::optional<double> lr;            ///< Unset: `default_lr`.
  std::optional<double> momentum;      ///< Unset: `default_momentum`.
  std::optional<double> weight_decay;  ///< Unset: PyTorch's, 0.01 for adamw and 0 for the others.
  bool nesterov = false;
  std::string line_search_fn;  ///< Of lbfgs; these three unset: see OptimizerOptions.
  std::optional<int64_t> max_iter;
  std::optional<int64_t> history_size;
  std::string schedule = "constant";
  int64_t warmup_steps = 0;
  int64_t lr_step_size = 1;  ///< Epochs, as users of StepLR count.
  double lr_gamma = 0.1;     ///< As StepLR.
  double min_lr = 0;
  int64_t accumulate_grad_batches = 1;
  double gradient_clip_val = 0;
  std::string on_nan = "stop";
  int64_t early_stop_patience = 0;  ///< Epochs; 0: never.
  std::optional<int64_t> limit_train_batches;
  std::optional<int64_t> limit_test_batches;
  uint64_t seed = 0;
  bool deterministic = false;

  // What is kept.
  std::string checkpoint_dir;
  int64_t checkpoint_every = 0;  ///< Steps; 0: after each epoch only.
  int64_t keep_checkpoints = 3;  ///< 0: all. Three survive two damaged ones and a full disk.
  std::string resume = "none";   ///< Going on unasked would surprise the user.
  std::string load_weights;
  std::string save_weights;
  std::string save_best;

  // What is told.
  std::string metrics_file;
  int64_t log_every_n_steps = 50;
  bool quiet = false;
};

/// PyTorch's defaults, but for sgd, whose 0.001 is meant to be set by the user. sgd has 0.05 here.
/// It has 0.01 for convnet and fashion-cnn, which diverge with 0.05 and the default momentum.
/// rmsprop, adam and adamw have 0.001, adagrad 0.01, lbfgs 1.
double default_lr(const std::string& optimizer, const std::string& model);
/// What a strategy is told.
StrategyOptions strategy_options(const RunConfig& config);
/// 0.9 for sgd, as most recipes have it; 0 for the others, as PyTorch.
double default_momentum(const std::string& optimizer);

/// "auto" and what this build knows.
std::vector<std::string> backend_names();

/// Sets what a TOML file names. Keys are the flags' names with dashes or underscores, in no table.
/// Throws UsageError with file and line when it is no TOML, for an unknown key (with those that may
/// be meant) and for a value that the key cannot have; also when there is no such file, or one of
/// more than 1 MiB.
void read_config(const std::filesystem::path& path, RunConfig& config);

/// The whole configuration as TOML, so that `--config` of it makes the same run. Unset values and
/// those that only say where this run stands (resume) are left out.
std::string to_toml(const RunConfig& config);

/// What a run that resumes may change, at the price of another course: learning rate, schedule,
/// clipping, weight decay. By flag, those that count in this run. `lr` and `momentum` are set.
std::map<std::string, std::string> settings_of(const RunConfig& config);

/// Checks what needs neither data nor devices: names, ranges, combinations. Throws UsageError
/// naming the flag, with the names that may be meant for an unknown word.
void check_config(const RunConfig& config);

}  // namespace lockstep
