#include "tools/lockstep/train/run_config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <variant>
#include <vector>

#include "lockstep/amp/precision.h"
#include "lockstep/base/duration.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/data/dataset.h"
#include "lockstep/launch/binding.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/pipeline/partition.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/memory_format.h"

namespace lockstep {
namespace {

using Field = std::variant<std::string RunConfig::*, bool RunConfig::*, int64_t RunConfig::*,
                           uint64_t RunConfig::*, double RunConfig::*,
                           std::optional<int64_t> RunConfig::*, std::optional<double> RunConfig::*>;

struct Key {
  const char* name;
  Field field;
};

const std::vector<Key>& keys() {
  using C = RunConfig;
  static const std::vector<Key> all{
      {"model", &C::model},
      {"dataset", &C::dataset},
      {"data-dir", &C::data_dir},
      {"download", &C::download},
      {"image-size", &C::image_size},
      {"augment", &C::augment},
      {"devices", &C::devices},
      {"accelerator", &C::accelerator},
      {"strategy", &C::strategy},
      {"mesh", &C::mesh},
      {"num-micro-batches", &C::num_micro_batches},
      {"pipeline-schedule", &C::pipeline_schedule},
      {"pipeline-stages-per-rank", &C::pipeline_stages_per_rank},
      {"pipeline-plan", &C::pipeline_plan},
      {"pipeline-balance", &C::pipeline_balance},
      {"recompute-activations", &C::recompute_activations},
      {"dp-replicas", &C::dp_replicas},
      {"precision", &C::precision},
      {"amp-level", &C::amp_level},
      {"loss-scale", &C::loss_scale},
      {"backend", &C::backend},
      {"threads", &C::threads},
      {"bind-to", &C::bind_to},
      {"memory-format", &C::memory_format},
      {"num-workers", &C::num_workers},
      {"timeout", &C::timeout},
      {"max-epochs", &C::max_epochs},
      {"batch-size", &C::batch_size},
      {"optimizer", &C::optimizer},
      {"lr", &C::lr},
      {"momentum", &C::momentum},
      {"weight-decay", &C::weight_decay},
      {"nesterov", &C::nesterov},
      {"line-search-fn", &C::line_search_fn},
      {"max-iter", &C::max_iter},
      {"history-size", &C::history_size},
      {"schedule", &C::schedule},
      {"warmup-steps", &C::warmup_steps},
      {"lr-step-size", &C::lr_step_size},
      {"lr-gamma", &C::lr_gamma},
      {"min-lr", &C::min_lr},
      {"accumulate-grad-batches", &C::accumulate_grad_batches},
      {"gradient-clip-val", &C::gradient_clip_val},
      {"on-nan", &C::on_nan},
      {"early-stop-patience", &C::early_stop_patience},
      {"limit-train-batches", &C::limit_train_batches},
      {"limit-test-batches", &C::limit_test_batches},
      {"seed", &C::seed},
      {"deterministic", &C::deterministic},
      {"checkpoint-dir", &C::checkpoint_dir},
      {"checkpoint-every", &C::checkpoint_every},
      {"keep-checkpoints", &C::keep_checkpoints},
      {"resume", &C::resume},
      {"load-weights", &C::load_weights},
      {"save-weights", &C::save_weights},
      {"save-best", &C::save_best},
      {"metrics-file", &C::metrics_file},
      {"log-every-n-steps", &C::log_every_n_steps},
      {"quiet", &C::quiet},
  };
  return all;
}

std::vector<std::string> key_names() {
  std::vector<std::string> names;
  for (const Key& key : keys()) names.emplace_back(key.name);
  return names;
}

template <class T>
struct Unwrapped {
  using type = T;
};
template <class T>
struct Unwrapped<std::optional<T>> {
  using type = T;
};

template <class T>
const char* expected_text() {
  if constexpr (std::is_same_v<T, std::string>) return "a text in quotes";
  if constexpr (std::is_same_v<T, bool>) return "true or false";
  if constexpr (std::is_same_v<T, double>) return "a number";
  return "a whole number";
}

template <class T>
std::optional<T> value_of(const toml::node& node) {
  if constexpr (std::is_same_v<T, double>) {
    if (node.is_boolean()) return std::nullopt;
    return node.value<double>();
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    const auto value = node.value_exact<int64_t>();
    return value ? std::optional(static_cast<uint64_t>(*value)) : std::nullopt;
  } else {
    return node.value_exact<T>();
  }
}

void set(RunConfig& config, const Key& key, const toml::node& node, const std::string& where) {
  std::visit(
      [&](auto member) {
        using T = Unwrapped<std::decay_t<decltype(config.*member)>>::type;
        const auto value = value_of<T>(node);
        if (!value) throw UsageError(where + ": " + key.name + " must be " + expected_text<T>());
        config.*member = *value;  // NOLINT(bugprone-optional-value-conversion): not all are.
      },
      key.field);
}

toml::table parsed(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    throw UsageError("--config " + path.string() + ": there is no such file",
                     "a run's own configuration is config.toml in its --checkpoint-dir");
  }
  if (std::filesystem::is_directory(path, ignored)) {
    throw UsageError("--config " + path.string() + ": this is a folder; a file is needed");
  }
  constexpr size_t kMost = size_t{1} << 20;
  try {
    return toml::parse(read_file(path, kMost), path.string());
  } catch (const DataError& error) {
    throw UsageError("--config " + std::string(error.what()),
                     "it must be TOML, with lines as in: max-epochs = 3, or: model = \"mlp\"");
  } catch (const toml::parse_error& error) {
    throw UsageError(path.string() + ", line " + std::to_string(error.source().begin.line) +
                         ": this is no TOML: " + std::string(error.description()),
                     "lines are as in: max-epochs = 3, or: model = \"mlp\"");
  }
}

/// TOML wants a point or an exponent in a number that is not whole; 17 digits keep every bit.
std::string number_text(double value) {
  std::ostringstream text;
  text.precision(std::numeric_limits<double>::max_digits10);
  text << value;
  double shorter = 0;
  for (int digits = 1; digits < 17; ++digits) {
    std::ostringstream attempt;
    attempt.precision(digits);
    attempt << value;
    shorter = std::stod(attempt.str());
    if (shorter == value) {
      text.str(attempt.str());
      break;
    }
  }
  std::string result = text.str();
  if (result.find_first_of(".en") == std::string::npos) result += ".0";
  return result;
}

std::string toml_text(const std::string& value) {
  std::ostringstream text;
  text << toml::value<std::string>(value);
  return text.str();
}
std::string toml_text(bool value) {
  return value ? "true" : "false";
}
std::string toml_text(int64_t value) {
  return std::to_string(value);
}
// TOML's whole numbers have a sign; the upper half of a seed's range becomes negative.
std::string toml_text(uint64_t value) {
  return std::to_string(static_cast<int64_t>(value));
}
std::string toml_text(double value) {
  return number_text(value);
}
template <class T>
std::string toml_text(const std::optional<T>& value) {
  return value ? toml_text(*value) : std::string();
}

template <class T>
void check_at_least(const char* flag, T value, T minimum) {
  if (value >= minimum) return;
  std::ostringstream text;
  text << flag << " is " << value << "; it must be at least " << minimum;
  throw UsageError(text.str());
}

void check_ranges(const RunConfig& config) {
  check_at_least<int64_t>("--devices", config.devices, 1);
  check_at_least<int64_t>("--max-epochs", config.max_epochs, 0);
  check_at_least<int64_t>("--batch-size", config.batch_size, 1);
  check_at_least<int64_t>("--num-workers", config.num_workers, 0);
  check_at_least<int64_t>("--threads", config.threads.value_or(1), 1);
  check_at_least<int64_t>("--num-micro-batches", config.num_micro_batches.value_or(1), 1);
  check_at_least<int64_t>("--pipeline-stages-per-rank", config.pipeline_stages_per_rank, 0);
  check_at_least<int64_t>("--dp-replicas", config.dp_replicas.value_or(1), 1);
  check_at_least<int64_t>("--max-iter", config.max_iter.value_or(1), 1);
  check_at_least<int64_t>("--history-size", config.history_size.value_or(1), 1);
  check_at_least<int64_t>("--warmup-steps", config.warmup_steps, 0);
  check_at_least<int64_t>("--lr-step-size", config.lr_step_size, 1);
  check_at_least<int64_t>("--accumulate-grad-batches", config.accumulate_grad_batches, 1);
  check_at_least<int64_t>("--early-stop-patience", config.early_stop_patience, 0);
  check_at_least<int64_t>("--limit-train-batches", config.limit_train_batches.value_or(1), 1);
  check_at_least<int64_t>("--limit-test-batches", config.limit_test_batches.value_or(1), 1);
  check_at_least<int64_t>("--image-size", config.image_size, 1);
  check_at_least<int64_t>("--checkpoint-every", config.checkpoint_every, 0);
  check_at_least<int64_t>("--keep-checkpoints", config.keep_checkpoints, 0);
  check_at_least<int64_t>("--log-every-n-steps", config.log_every_n_steps, 1);
  check_at_least("--lr", config.lr.value_or(0), 0.0);
  check_at_least("--momentum", config.momentum.value_or(0), 0.0);
  check_at_least("--weight-decay", config.weight_decay.value_or(0), 0.0);
  check_at_least("--gradient-clip-val", config.gradient_clip_val, 0.0);
  check_at_least("--min-lr", config.min_lr, 0.0);
  if (config.timeout && !timeout_of_seconds(*config.timeout)) {
    std::ostringstream text;
    text << "--timeout is " << *config.timeout << "; it must be " << timeout_bounds();
    throw UsageError(text.str());
  }
}

/// What can be said of each value by itself.
void check_values(const RunConfig& config) {
  check_model_name("--model", config.model);
  check_dataset_name("--dataset", config.dataset);
  expect_one_of("--accelerator", config.accelerator, {"auto", "cpu", "cuda", "gpu"});
  expect_one_of("--backend", config.backend, backend_names());
  expect_one_of("--bind-to", config.bind_to, launch::binding_names());
  expect_one_of("--memory-format", config.memory_format, memory_format_names());
  expect_one_of("--strategy", config.strategy, strategy_names());
  expect_one_of("--precision", config.precision, precision_names());
  if (!config.amp_level.empty()) {
    expect_one_of("--amp-level", config.amp_level, amp_level_names());
  }
  expect_one_of("--optimizer", config.optimizer, optimizer_names());
  if (!config.line_search_fn.empty()) {
    expect_one_of("--line-search-fn", config.line_search_fn, line_search_names());
  }
  if (!config.pipeline_balance.empty()) {
    expect_one_of("--pipeline-balance", config.pipeline_balance, pipeline_balance_names());
  }
  expect_one_of("--schedule", config.schedule, schedule_names());
  expect_one_of("--on-nan", config.on_nan, {"stop", "skip", "proceed"});
  check_ranges(config);
}

/// A value from a file, checked where the file and the line can still be told.
void check_value(const Key& key, const toml::node& node, const std::string& where) {
  RunConfig alone;
  set(alone, key, node, where);
  try {
    check_values(alone);
  } catch (const UsageError& error) {
    std::string text = error.what();
    if (text.starts_with("--")) text.erase(0, 2);  // a key has no dashes
    throw UsageError(where + ": " + text);
  }
}

/// A flag that nobody would look at is a mistake. `owner` is what it is for: "--strategy pipeline".
void refuse_if(bool given, const std::string& flag, const std::string& owner,
               const std::string& chosen) {
  if (!given) return;
  const std::string kind = owner.substr(0, owner.find(' '));
  throw UsageError(flag + " is for " + owner + "; " + kind + " is " + chosen,
                   "leave it out, or train with " + owner);
}

void check_strategy_flags(const RunConfig& config) {
  const auto refuse = [&](bool given, const char* flag, const char* owner) {
    refuse_if(given, flag, std::string("--strategy ") + owner, config.strategy);
  };
  if (config.strategy != "dp") refuse(config.dp_replicas.has_value(), "--dp-replicas", "dp");
  if (config.strategy == "pipeline") return;
  refuse(config.num_micro_batches.has_value(), "--num-micro-batches", "pipeline");
  refuse(!config.pipeline_schedule.empty(), "--pipeline-schedule", "pipeline");
  refuse(config.pipeline_stages_per_rank != 0, "--pipeline-stages-per-rank", "pipeline");
  refuse(!config.pipeline_plan.empty(), "--pipeline-plan", "pipeline");
  refuse(!config.pipeline_balance.empty(), "--pipeline-balance", "pipeline");
  refuse(config.recompute_activations, "--recompute-activations", "pipeline");
}

void check_optimizer_flags(const RunConfig& config) {
  if (config.optimizer == "lbfgs") return;
  const auto refuse = [&](bool given, const char* flag) {
    refuse_if(given, flag, "--optimizer lbfgs", config.optimizer);
  };
  refuse(!config.line_search_fn.empty(), "--line-search-fn");
  refuse(config.max_iter.has_value(), "--max-iter");
  refuse(config.history_size.has_value(), "--history-size");
}

}  // namespace

double default_lr(const std::string& optimizer, const std::string& model) {
  if (optimizer == "sgd") return model == "convnet" || model == "fashion-cnn" ? 0.01 : 0.05;
  if (optimizer == "lbfgs") return 1;
  return optimizer == "adagrad" ? 0.01 : 0.001;
}

StrategyOptions strategy_options(const RunConfig& config) {
  StrategyOptions options;
  options.mesh = config.mesh;
  options.num_micro_batches = config.num_micro_batches.value_or(options.num_micro_batches);
  if (!config.pipeline_schedule.empty()) options.pipeline_schedule = config.pipeline_schedule;
  options.pipeline_stages_per_rank = config.pipeline_stages_per_rank;
  if (!config.pipeline_plan.empty()) options.pipeline_plan = split(config.pipeline_plan, ',');
  if (!config.pipeline_balance.empty()) options.pipeline_balance = config.pipeline_balance;
  options.recompute_activations = config.recompute_activations;
  options.dp_replicas = config.dp_replicas.value_or(options.dp_replicas);
  return options;
}

double default_momentum(const std::string& optimizer) {
  return optimizer == "sgd" ? 0.9 : 0;
}

void read_config(const std::filesystem::path& path, RunConfig& config) {
  const toml::table table = parsed(path);
  for (const auto& [name, node] : table) {
    std::string wanted(name.str());
    std::replace(wanted.begin(), wanted.end(), '_', '-');
    const std::string where = path.string() + ", line " + std::to_string(node.source().begin.line);
    const auto same = [&](const Key& key) { return wanted == key.name; };
    const auto key = std::find_if(keys().begin(), keys().end(), same);
    if (key == keys().end()) {
      const auto meant = did_you_mean(wanted, key_names());
      throw UsageError(where + ": unknown key '" + std::string(name.str()) + "'" +
                           (meant.empty() ? "" : "; " + meant),
                       "keys are the flags' names, as 'lockstep train --help' lists them, without "
                       "dashes before");
    }
    check_value(*key, node, where);
    set(config, *key, node, where);
  }
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names = {"auto"};
  for (const auto& backend : available_backends()) names.push_back(backend.name);
  std::sort(names.begin() + 1, names.end());
  return names;
}

std::string to_toml(const RunConfig& config) {
  std::string text;
  for (const Key& key : keys()) {
    const std::string name = key.name;
    if (name == "resume") continue;
    const std::string value =
        std::visit([&](auto member) { return toml_text(config.*member); }, key.field);
    if (!value.empty()) text += name + " = " + value + "\n";
  }
  return text;
}

std::map<std::string, std::string> settings_of(const RunConfig& config) {
  const std::string& schedule = config.schedule;
  const double decay = config.weight_decay.value_or(config.optimizer == "adamw" ? 0.01 : 0);
  std::map<std::string, std::string> settings{
      {"--lr", toml_text(config.lr)},
      {"--momentum", toml_text(config.momentum)},
      {"--nesterov", toml_text(config.nesterov)},
      {"--weight-decay", toml_text(decay)},
      {"--gradient-clip-val", toml_text(config.gradient_clip_val)},
      {"--precision", config.precision},
      {"--amp-level", config.amp_level.empty() ? "none" : config.amp_level},
      {"--strategy", config.strategy},
      {"--mesh", config.mesh.empty() ? "none" : config.mesh},
      {"--schedule", schedule},
      {"--warmup-steps", toml_text(config.warmup_steps)}};
  if (config.optimizer == "lbfgs") {
    settings["--line-search-fn"] = config.line_search_fn.empty() ? "none" : config.line_search_fn;
    settings["--max-iter"] = toml_text(config.max_iter.value_or(OptimizerOptions().max_iter));
    settings["--history-size"] =
        toml_text(config.history_size.value_or(OptimizerOptions().history_size));
  }
  if (schedule == "step") {
    settings["--lr-step-size"] = toml_text(config.lr_step_size);
    settings["--lr-gamma"] = toml_text(config.lr_gamma);
  }
  if (schedule == "cosine" || schedule == "linear") {
    settings["--min-lr"] = toml_text(config.min_lr);
    settings["--max-epochs"] = toml_text(config.max_epochs);  // the rate falls to its end
  }
  return settings;
}

void check_config(const RunConfig& config) {
  check_values(config);
  check_strategy_flags(config);
  check_optimizer_flags(config);
  if (config.checkpoint_every > 0 && config.checkpoint_dir.empty()) {
    throw UsageError("--checkpoint-every needs --checkpoint-dir, the folder to save to");
  }
  if (config.resume == "auto" && config.checkpoint_dir.empty()) {
    throw UsageError("--resume auto needs --checkpoint-dir, the folder to look in");
  }
  if (config.resume != "none" && !config.load_weights.empty()) {
    throw UsageError("--resume and --load-weights exclude each other",
                     "--load-weights starts anew from weights; --resume goes on with a run");
  }
}

}  // namespace lockstep
