#include "tools/lockstep/train/run_config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/amp/precision.h"
#include "lockstep/base/duration.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/data/dataset.h"
#include "lockstep/launch/binding.h"
#include "lockstep/launch/generation_folder.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/memory_format.h"

namespace lockstep {
namespace {

/// "auto" and what this build knows.
std::vector<std::string> backend_names() {
  std::vector<std::string> names = {"auto"};
  for (const auto& backend : available_backends()) names.push_back(backend.name);
  std::sort(names.begin() + 1, names.end());
  return names;
}

/// "ddp: every rank has the whole model; zero1: ..."
std::string strategies_text() {
  std::vector<std::string> rows;
  for (const StrategyInfo& info : strategy_infos()) rows.push_back(info.name + ": " + info.summary);
  return join(rows, "; ");
}

void check_logger_names(const std::string& flag, const std::string& value) {
  for (const auto& name : split(value, ','))
    expect_one_of(flag, name, {"jsonl", "mlflow", "prometheus", "tensorboard"});
}

/// Suggests for the words of other programs, fp16 and float32, those that begin with their bits.
void check_precision(const std::string& flag, const std::string& value) {
  const auto known = precision_names();
  if (std::find(known.begin(), known.end(), value) != known.end()) return;
  std::string bits = to_lower(value);
  for (const auto& [other, ours] : {std::pair{"bfloat", "bf"}, {"float", ""}, {"fp", ""}})
    if (bits.starts_with(other)) bits.replace(0, std::string_view(other).size(), ours);
  throw UsageError(flag + ": unknown value '" + value + "'; expected one of " + join(known, ", "),
                   did_you_mean(bits, known));
}

void check_address(const std::string& flag, const std::string& value) {
  endpoint_of(flag, value);
}

std::vector<Flag> make_train_flags() {
  std::vector<Flag> flags;
  std::string heading;
#define GROUP(title) heading = title;
#define FLAG(type, member, initial, text, ...)                  \
  flags.push_back(Flag{.name = tool::with_dashes("--" #member), \
                       .field = &RunConfig::member,             \
                       .group = heading,                        \
                       .help = text __VA_OPT__(, ) __VA_ARGS__});
#include "tools/lockstep/train/run_flags.def"
#undef FLAG
#undef GROUP
  return flags;
}

/// None where there is none of that name.
const Flag* find_flag(const std::string& name) {
  const auto& flags = train_flags();
  const auto found =
      std::find_if(flags.begin(), flags.end(), [&](const Flag& flag) { return flag.name == name; });
  return found == flags.end() ? nullptr : &*found;
}

std::string key_of(const Flag& flag) {
  return flag.name.substr(2);
}

toml::table parsed(const std::filesystem::path& path) {
  constexpr size_t kMost = size_t{1} << 20;
  try {
    return toml::parse(read_file(path, kMost), path.string());
  } catch (const Error& error) {
    throw UsageError("--config " + path.string() + ": " + error.what(),
                     "it must be TOML, with lines as in: max-epochs = 3, or: model = \"mlp\"; a "
                     "run's own is config.toml in its --checkpoint-dir");
  } catch (const toml::parse_error& error) {
    throw UsageError(path.string() + ", line " + std::to_string(error.source().begin.line) +
                         ": this is no TOML: " + std::string(error.description()),
                     "lines are as in: max-epochs = 3, or: model = \"mlp\"");
  }
}

template <class T>
std::string toml_text(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    std::ostringstream text;
    text << toml::value(value);
    return text.str();
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    // TOML's whole numbers have a sign; the upper half of a seed's range becomes negative.
    return std::to_string(static_cast<int64_t>(value));
  } else {
    return nlohmann::json(value).dump();  // Of numbers, true and false it is TOML, too.
  }
}
template <class T>
std::string toml_text(const std::optional<T>& value) {
  return value ? toml_text(*value) : std::string();
}

/// As TOML; empty where it is unset.
std::string toml_text(const Flag& flag, const RunConfig& config) {
  return std::visit([&](auto member) { return toml_text(config.*member); }, flag.field);
}

/// The same without quotes; "none" where it is unset.
std::string plain_text(const Flag& flag, const RunConfig& config) {
  const auto* const text = std::get_if<std::string RunConfig::*>(&flag.field);
  const std::string value = text ? config.**text : toml_text(flag, config);
  return value.empty() ? "none" : value;
}

bool is_default(const Flag& flag, const RunConfig& config) {
  static const RunConfig kDefaults;
  return toml_text(flag, config) == toml_text(flag, kDefaults);
}

bool counts(const Flag& flag, const RunConfig& config) {
  const auto& [other, values] = flag.only_with;
  if (other.empty()) return true;
  auto words = split(plain_text(*find_flag(other), config), ',');
  if (other == "--strategy" && is_pipeline(config.strategy, {.mesh = config.mesh}))
    words.emplace_back("pipeline");
  return std::find_first_of(words.begin(), words.end(), values.begin(), values.end()) !=
         words.end();
}

/// A flag that nobody would look at is a mistake.
void refuse_if_it_does_not_count(const Flag& flag, const RunConfig& config) {
  if (is_default(flag, config) || counts(flag, config)) return;
  const std::string& other = flag.only_with.flag;
  std::string owner = other + " " + join(flag.only_with.values, " or ");
  if (flag.only_with.values.front() == "pipeline") owner += " or a --mesh with pp";
  throw UsageError(flag.name + " is for " + owner + "; " + other + " is " +
                       plain_text(*find_flag(other), config),
                   "leave it out, or train with " + owner);
}

void check_loggers(const RunConfig& config) {
  const bool needs_folder = has_logger(config, "tensorboard") || has_logger(config, "jsonl");
  if (needs_folder && config.log_dir.empty()) {
    throw UsageError("--logger " + config.logger + " needs --log-dir, the folder to write to",
                     "--log-dir runs/a");
  }
  if (!config.dashboard && config.dashboard_address != RunConfig().dashboard_address)
    throw UsageError("--dashboard-address is for --dashboard, which is not given");
}

double default_lr(const RunConfig& config) {
  const std::string& optimizer = config.optimizer;
  if (optimizer == "sgd") {
    return config.model == "convnet" || config.model == "fashion-cnn" ? 0.01 : 0.05;
  }
  if (optimizer == "lbfgs") return 1;
  return optimizer == "adagrad" ? 0.01 : 0.001;
}

bool rate_falls_to_the_end(const RunConfig& config) {
  return config.schedule == "cosine" || config.schedule == "linear";
}

void check_torch_script(const RunConfig& config) {
  if (config.save_model.empty()) return;
  if (!model_info(config.model).from_file) {
    throw UsageError(
        "--save-model writes TorchScript, which the C++ model " + config.model + " cannot become",
        "--save-weights FILE.pt writes its weights. In Python a module of the same names takes "
        "them "
        "(load_state_dict(torch.load(FILE.pt))), and torch.jit.script(module).save makes "
        "TorchScript");
  }
  const std::filesystem::path path(config.save_model);
  if (path.extension() == ".pt") return;
  throw UsageError(
      "--save-model " + path.string() + ": TorchScript is written to a file that ends in .pt",
      "--save-model " + std::filesystem::path(path).replace_extension(".pt").string() +
          "; --save-weights writes weights as safetensors");
}

/// What a flag says, in the options of its strategies. A flag that is not given leaves them unset.
template <class Options, class T, class Value>
void set_option(std::optional<Options>& options, T Options::*member, const Value& flag) {
  if (flag == Value()) return;
  if (!options) options.emplace();
  if constexpr (std::is_same_v<Value, std::optional<T>>) {
    *options.*member = *flag;
  } else {
    *options.*member = flag;
  }
}

CommHook hook_of(const std::string& name) {
  if (name == "fp16_compress") return CommHook::fp16_compress;
  return name == "bf16_compress" ? CommHook::bf16_compress : CommHook::none;
}

std::vector<std::string> names_of(const std::string& list) {
  return list.empty() ? std::vector<std::string>() : split(list, ',');
}

bool is_in(const Flag& flag, const std::vector<std::string>& groups) {
  return groups.empty() || std::find(groups.begin(), groups.end(), flag.group) != groups.end();
}

std::string text_of(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) return *text;
  std::ostringstream value;
  value << toml::node_view<const toml::node>(node);
  return value.str();
}

/// Flags have one value each, and no sections.
void refuse_compound(const std::string& where, const std::string& key, const toml::node& node) {
  if (const toml::table* section = node.as_table()) {
    const std::string first = section->empty() ? "lr" : std::string(section->begin()->first.str());
    throw UsageError(where + "[" + key + "] is a section; flags stand in none",
                     "take the heading away, so that the line is: " + first + " = ...");
  }
  if (const toml::array* list = node.as_array()) {
    std::vector<std::string> words;
    for (const toml::node& word : *list) words.push_back(text_of(word));
    throw UsageError(where + key + " is a list; a flag has one value",
                     "write: " + key + " = \"" + join(words, ",") + "\"");
  }
}

}  // namespace

const std::vector<Flag>& train_flags() {
  static const std::vector<Flag> flags = make_train_flags();
  return flags;
}

RunConfig resolved(RunConfig config) {
  config.lr = config.lr.value_or(default_lr(config));
  config.momentum = config.momentum.value_or(config.optimizer == "sgd" ? 0.9 : 0);
  config.weight_decay = config.weight_decay.value_or(config.optimizer == "adamw" ? 0.01 : 0);
  if (config.optimizer == "lbfgs") {
    config.max_iter = config.max_iter.value_or(OptimizerOptions().max_iter);
    config.history_size = config.history_size.value_or(OptimizerOptions().history_size);
  }
  return config;
}

std::pair<std::string, uint16_t> endpoint_of(const std::string& flag, const std::string& value) {
  const auto colon = value.rfind(':');
  const auto port = colon == std::string::npos ? std::nullopt : parse_int(value.substr(colon + 1));
  if (port && *port >= 0 && *port <= 65535 && colon > 0)
    return {value.substr(0, colon), static_cast<uint16_t>(*port)};
  throw UsageError(flag + " " + value + " is not HOST:PORT", flag + " 127.0.0.1:9400");
}

bool has_logger(const RunConfig& config, const std::string& name) {
  const auto names = split(config.logger, ',');
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::map<std::string, std::string> hyperparameters_of(const RunConfig& config) {
  std::map<std::string, std::string> values;
  for (const Flag& flag : train_flags()) {
    const std::string value = plain_text(flag, config);
    if (value != "none") values[key_of(flag)] = value;
  }
  return values;
}

StrategyOptions strategy_options(const RunConfig& config) {
  StrategyOptions options;
  options.mesh = config.mesh;
  config.strategy == "fsdp"
      ? set_option(options.fsdp, &FsdpOptions::find_unused_parameters,
                   config.find_unused_parameters)
      : set_option(options.ddp, &DdpOptions::find_unused_parameters, config.find_unused_parameters);
  set_option(options.ddp, &DdpOptions::bucket_cap_mb, config.bucket_cap_mb);
  set_option(options.ddp, &DdpOptions::comm_hook, hook_of(config.comm_hook));
  set_option(options.fsdp, &FsdpOptions::units, names_of(config.fsdp_units));
  set_option(options.fsdp, &FsdpOptions::min_unit_elements, config.fsdp_min_unit_elements);
  set_option(options.pipeline, &PipelineOptions::num_micro_batches, config.num_micro_batches);
  set_option(options.pipeline, &PipelineOptions::schedule, config.pipeline_schedule);
  set_option(options.pipeline, &PipelineOptions::stages_per_rank, config.pipeline_stages_per_rank);
  set_option(options.pipeline, &PipelineOptions::plan, names_of(config.pipeline_plan));
  set_option(options.pipeline, &PipelineOptions::balance, config.pipeline_balance);
  set_option(options.pipeline, &PipelineOptions::recompute_activations,
             config.recompute_activations);
  set_option(options.dp, &DataParallelOptions::replicas, config.dp_replicas);
  if (config.logical_shards > 0)
    options.logical_shards = LogicalShardsOptions{config.logical_shards, config.seed};
  return options;
}

void add_flags(tool::Cli& cli, RunConfig& config, const std::vector<std::string>& groups) {
  for (const Flag& flag : train_flags()) {
    if (!is_in(flag, groups)) continue;
    cli.group(flag.group);
    cli.also_called(flag.name, flag.also_called);
    std::visit(
        [&](auto member) {
          auto& value = config.*member;
          using T = std::decay_t<decltype(value)>;
          if constexpr (std::is_same_v<T, bool>) {
            cli.flag(flag.name, value, flag.help);
          } else if constexpr (std::is_same_v<T, uint64_t>) {
            cli.seed(flag.name, value, flag.help);
          } else if constexpr (std::is_same_v<T, int64_t>) {
            if (!flag.may_be_auto) return cli.option(flag.name, value, flag.help, flag.range);
            cli.custom(flag.name, "N|auto", flag.help,
                       value == kAuto ? "auto" : std::to_string(value),
                       [&value, &flag](const std::string& text) {
                         if (text == "auto") {
                           value = kAuto;
                           return;
                         }
                         const auto number = parse_int(text);
                         const auto [least, most] = flag.range;
                         if (!number || !(*number >= least && *number <= most))
                           throw UsageError(flag.name + ": '" + text +
                                            "' is neither auto nor a whole number from " +
                                            std::to_string(std::llround(least)) + " to " +
                                            std::to_string(std::llround(most)));
                         value = *number;
                       });
          } else if constexpr (!std::is_same_v<T, std::string>) {
            cli.option(flag.name, value, flag.help, flag.range);
          } else if (flag.check) {  // Also of an empty text.
            cli.custom(flag.name, flag.placeholder, flag.help, value,
                       [&value, &flag](const std::string& text) {
                         flag.check(flag.name, text);
                         value = text;
                       });
          } else if (flag.choices.empty()) {
            cli.option(flag.name, value, flag.help, flag.placeholder);
          } else {
            cli.choice(flag.name, value, flag.choices, flag.help);
          }
        },
        flag.field);
    if (!flag.line.empty() && groups.empty()) cli.common(flag.name, flag.line);
  }
}

void read_config(const std::filesystem::path& path, RunConfig& config,
                 const std::vector<std::string>& groups) {
  RunConfig read = config;
  tool::Cli cli("lockstep train", {});
  add_flags(cli, read);
  for (const auto& [key, node] : parsed(path)) {
    const std::string where =
        path.string() + ", line " + std::to_string(node.source().begin.line) + ": ";
    refuse_compound(where, std::string(key.str()), node);
    cli.configure(tool::with_dashes("--" + std::string(key.str())), text_of(node), where);
  }
  for (const Flag& flag : train_flags())
    if (is_in(flag, groups))
      std::visit([&](auto member) { config.*member = read.*member; }, flag.field);
}

std::string to_toml(const RunConfig& config) {
  std::string text;
  for (const Flag& flag : train_flags()) {
    const std::string value = toml_text(flag, config);
    if (value.empty() || flag.on_resume == OnResume::not_saved) continue;
    text += key_of(flag) + " = " + value + "\n";
  }
  return text;
}

std::map<std::string, std::string> identity_of(const RunConfig& config) {
  std::map<std::string, std::string> identity;
  for (const Flag& flag : train_flags()) {
    if (flag.on_resume == OnResume::refused) identity[flag.name] = plain_text(flag, config);
  }
  return identity;
}

std::map<std::string, std::string> settings_of(const RunConfig& config) {
  std::map<std::string, std::string> settings;
  for (const Flag& flag : train_flags()) {
    const bool warned =
        flag.on_resume == OnResume::warned ||
        (flag.on_resume == OnResume::warned_where_rate_falls && rate_falls_to_the_end(config));
    if (warned && counts(flag, config)) settings[flag.name] = plain_text(flag, config);
  }
  return settings;
}

std::map<std::string, std::string> settings_of_all_ranks(const RunConfig& config) {
  std::map<std::string, std::string> settings;
  for (const Flag& flag : train_flags()) {
    const std::string value = toml_text(flag, config);
    if (flag.on_ranks == OnRanks::same && !value.empty()) settings[flag.name] = value;
    if (flag.on_ranks == OnRanks::all_or_none && !is_default(flag, config)) {
      settings[flag.name] = "set";
    }
  }
  // Each host may have its own copy of a file.
  if (config.dataset.starts_with("file:")) settings["--dataset"] = "file:PATH";
  return settings;
}

void check_config(const RunConfig& config) {
  for (const Flag& flag : train_flags()) refuse_if_it_does_not_count(flag, config);
  if (config.global_batch_size && config.batch_size != RunConfig().batch_size) {
    throw UsageError("--global-batch-size and --batch-size are both given",
                     "give one: the other follows from it and the number of ranks");
  }
  if (config.checkpoint_every > 0 && config.checkpoint_dir.empty()) {
    throw UsageError("--checkpoint-every needs --checkpoint-dir, the folder to save to");
  }
  const bool lives_on = config.max_restarts > 0 || env_string(launch::kGenerationFolderVariable);
  if (config.snapshot_every > 0 && config.checkpoint_dir.empty() && !lives_on) {
    throw UsageError("--snapshot-every needs --checkpoint-dir, to which the last one is written",
                     "or --max-restarts, to go on from it after a failure");
  }
  check_loggers(config);
  if (config.resume == "auto" && config.checkpoint_dir.empty()) {
    throw UsageError("--resume auto needs --checkpoint-dir, the folder to look in");
  }
  if (config.resume != "none" && !config.load_weights.empty()) {
    throw UsageError("--resume and --load-weights exclude each other",
                     "--load-weights starts anew from weights; --resume goes on with a run");
  }
  if (config.load_weights.empty() && !(config.load_only + config.load_rename).empty()) {
    throw UsageError("--load-only and --load-rename are for --load-weights, which is not given");
  }
  check_torch_script(config);
  if (is_pipeline(config.strategy, strategy_options(config)) &&
      model_info(config.model).from_file) {
    throw UsageError("a pipeline needs a chain of layers, which the TorchScript file " +
                         config.model + " is not known as",
                     "--strategy fsdp or zero2 shards it");
  }
  if (config.resume != "none" && !config.load_optimizer.empty()) {
    throw UsageError("--resume and --load-optimizer exclude each other",
                     "a checkpoint has the state of its optimizer");
  }
}

}  // namespace lockstep
