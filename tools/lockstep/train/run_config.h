#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/parallel/strategy.h"
#include "lockstep/tool/cli.h"

namespace lockstep {

/// Everything that `lockstep train` can be told: a field for each row of run_flags.def, whose type
/// and default it has. max_epochs is --max-epochs, and max-epochs in a configuration file.
struct RunConfig {
#define GROUP(title)
#define FLAG(type, name, initial, ...) type name = initial;
#include "tools/lockstep/train/run_flags.def"
#undef FLAG
#undef GROUP
};

/// What a run that resumes does where a flag has another value than in the checkpoint.
enum class OnResume {
  allowed,                  ///< Nothing: the course of training is the same.
  warned,                   ///< Goes on, on another course, and says so.
  warned_where_rate_falls,  ///< The same where the schedule ends with the run; else nothing.
  refused,                  ///< An error.
  not_saved,                ///< Says where this run stands: config.toml does not have it.
};

/// How far the ranks of one run must agree. Hosts may differ in where their files lie and in how
/// they compute.
enum class OnRanks {
  same,
  own,
  all_or_none,  ///< What rank 0 writes with the help of all: its value is each rank's own.
};

/// The value of a flag that was given the word "auto".
inline constexpr int64_t kAuto = -1;

/// A row of run_flags.def.
struct Flag {
  using Field =
      std::variant<std::string RunConfig::*, bool RunConfig::*, int64_t RunConfig::*,
                   uint64_t RunConfig::*, double RunConfig::*, std::optional<int64_t> RunConfig::*,
                   std::optional<double> RunConfig::*>;
  /// A flag that counts only where another one has one of these words. Else it is refused.
  struct OnlyWith {
    std::string flag = {};  ///< "--strategy"; empty: it always counts.
    std::vector<std::string> values = {};
  };

  std::string name;  ///< "--max-epochs".
  Field field;
  std::string group;  ///< Its heading in --help.
  std::string help;
  std::string placeholder = {};  ///< Of a text that is not one of `choices`.
  tool::Range range = {};        ///< Of a number.
  std::string line = {};         ///< Of a common flag, in the short help: see Cli::common.
  bool may_be_auto = false;      ///< A whole number may also be the word "auto": kAuto.
  std::vector<std::string> choices = {};
  /// Throws UsageError, which begins with the flag, for a text that it cannot have.
  void (*check)(const std::string& flag, const std::string& value) = nullptr;
  std::vector<std::string> also_called = {};  ///< Words of other tools: see Cli::also_called.
  OnlyWith only_with = {};
  OnResume on_resume = OnResume::allowed;
  OnRanks on_ranks = OnRanks::same;
};

/// All of them, in the order of --help.
const std::vector<Flag>& train_flags();

/// With values for what PyTorch's optimizers have defaults for: lr, momentum, weight_decay and, for
/// lbfgs, max_iter and history_size. They are PyTorch's, but for sgd, whose 0.001 is meant to be
/// set by the user. sgd has a rate of 0.05 here, and 0.01 for convnet and fashion-cnn, which
/// diverge with 0.05. Its momentum is 0.9, as most recipes have it.
RunConfig resolved(RunConfig config);

/// Of "HOST:PORT", where the port may be 0. Throws UsageError naming the flag.
std::pair<std::string, uint16_t> endpoint_of(const std::string& flag, const std::string& value);

/// Whether --logger names it.
bool has_logger(const RunConfig& config, const std::string& name);

/// What loggers are told of: the flags that have a value, without dashes.
std::map<std::string, std::string> hyperparameters_of(const RunConfig& config);

/// What a strategy is told.
StrategyOptions strategy_options(const RunConfig& config);

/// The flags of these groups; empty: all, with a short help of the common ones. They write into
/// `config`.
void add_flags(tool::Cli& cli, RunConfig& config, const std::vector<std::string>& groups = {});

/// Gives flags the values that a TOML file has for them. Keys are the flags' names with dashes or
/// underscores, in no table. Throws UsageError with file and line when it is no TOML, for an
/// unknown key (with those that may be meant) and for a value that the flag cannot have; also when
/// there is no such file, or one of more than 1 MiB. With groups only their flags get values.
void read_config(const std::filesystem::path& path, RunConfig& config,
                 const std::vector<std::string>& groups = {});

/// The whole configuration as TOML, so that `--config` of it makes the same run. Unset values are
/// left out.
std::string to_toml(const RunConfig& config);

/// By flag, the values that a run which resumes must have again (OnResume::refused).
std::map<std::string, std::string> identity_of(const RunConfig& config);
/// Those that it may change at the price of another course, as far as they count in this run
/// (OnResume::warned). Of a resolved configuration.
std::map<std::string, std::string> settings_of(const RunConfig& config);
/// What every rank must have been told alike.
std::map<std::string, std::string> settings_of_all_ranks(const RunConfig& config);

/// Checks which flags go together, as far as that needs neither data nor devices. Throws UsageError
/// naming the flags.
void check_config(const RunConfig& config);

}  // namespace lockstep
