#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace at {
class Tensor;
}

namespace lockstep {

/// Named numbers, in the order in which they are shown. NaN: not known.
using MetricValues = std::vector<std::pair<std::string, double>>;

/// Where metrics go, as Lightning's Logger. A Trainer writes to those of TrainerOptions::loggers on
/// rank 0. A loop of one's own makes one on rank 0 and calls `log`:
///
///     const auto logger = lockstep::tensorboard_logger("runs/a");
///     logger->log(step, {{"loss", loss}, {"lr", rate}}, "train");
///
/// Nothing is opened before `begin` or the first other call. One thread at a time. Calls block
/// until the system has taken what is written. They throw SystemError, naming the file or address.
class Logger {
 public:
  virtual ~Logger() = default;
  /// A run begins, or goes on after `step` steps and `epochs` whole epochs: what an earlier process
  /// has logged of later ones no longer counts. May be called again, where ranks meet again.
  /// Without this call the run begins anew.
  virtual void begin(int64_t step, int64_t epochs) {}
  void begin() { begin(0, 0); }
  /// Values after so many steps. `split` says of what, such as "train" or "test". It becomes a part
  /// of the name where the destination has names only: "train/loss".
  virtual void log(int64_t step, const MetricValues& values, const std::string& split) = 0;
  void log(int64_t step, const MetricValues& values) { log(step, values, {}); }
  /// Values of each rank, with the same names. By default as of the splits "rank0", "rank1", ...
  virtual void log_ranks(int64_t step, const std::vector<MetricValues>& ranks);
  /// The run's configuration.
  virtual void log_hyperparameters(const std::map<std::string, std::string>& values) {}
  /// The distribution of a tensor's elements. Only TensorBoard shows it.
  virtual void log_histogram(int64_t step, const std::string& name, const at::Tensor& values) {}
  virtual void flush() {}
  /// The run has ended; of what, where it failed. Does not throw.
  virtual void close(const std::string& failure) noexcept {}
  void close() { close({}); }
};

/// JSON lines, each a whole line at once:
/// - of `log`: step, split where there is one, and the values,
/// - of `log_ranks`: step, split "ranks", and an array for each value, by rank,
/// - of `log_hyperparameters` and of a failure: split "run", "hyperparameters" or "failure".
///
/// A number that is not finite is written as null. `begin` keeps the rows up to where the run goes
/// on, and overwrites an earlier run with a warning. Two runs at a time need two files. A device, a
/// pipe or /dev/stdout is only written to.
struct JsonLinesOptions {
  std::filesystem::path path;  ///< In a folder that is there: runs/a/metrics.jsonl.
  bool only_metrics = false;   ///< Only rows of `log` for the splits other than "run".
};
std::shared_ptr<Logger> json_lines_logger(JsonLinesOptions options);
/// Throws Error when such a file could not be written. Changes nothing.
void check_json_lines(const std::filesystem::path& path);

/// Event files in a folder, which `tensorboard --logdir` shows: scalars, histograms of 64 equal
/// parts, and the configuration as a text. Values that are NaN are left out. Each `begin` makes a
/// file of its own, which takes back what earlier ones have of later steps.
std::shared_ptr<Logger> tensorboard_logger(std::filesystem::path folder);

struct PrometheusOptions {
  std::string host = "127.0.0.1";  ///< "0.0.0.0" lets other hosts read.
  uint16_t port = 0;               ///< 0: a free one, which a line on standard error names.
};
/// Serves the latest values at http://HOST:PORT/metrics, from threads of its own, while it lives:
/// gauges lockstep_NAME with the label split, or rank for those of a rank. Throws UsageError where
/// the build has no prometheus-cpp. `begin` throws Error where it cannot serve.
std::shared_ptr<Logger> prometheus_logger(PrometheusOptions options = {});

/// What is empty is that of MLflow's environment variables.
struct MlflowOptions {
  std::string tracking_uri = {};  ///< MLFLOW_TRACKING_URI: http://HOST:PORT.
  std::string experiment =
      {};  ///< MLFLOW_EXPERIMENT_NAME, else "Default". Made where it is not there.
  std::string run_name = {};  ///< MLFLOW_RUN_NAME, else the server chooses one.
  std::string run_id = {};    ///< MLFLOW_RUN_ID: of a run to go on with, else a new one.
};
/// Metrics and parameters of a run on an MLflow server, over its REST interface, at most once in a
/// second. MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD, say who asks. `begin` throws Error
/// where the server does not answer. Later a warning says so, and what was not sent is kept for the
/// next time. NaN is left out. A name that the server refuses is told once, and its values are left
/// out. Throws UsageError without a server's address.
std::shared_ptr<Logger> mlflow_logger(MlflowOptions options = {});

}  // namespace lockstep
