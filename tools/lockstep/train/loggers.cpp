#include "tools/lockstep/train/loggers.h"

#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/tool/output_file.h"
#include "tools/lockstep/report/dashboard.h"

namespace lockstep {
namespace fs = std::filesystem;

std::string json_lines_path(const RunConfig& config) {
  return has_logger(config, "jsonl") ? fs::path(config.log_dir) / "metrics.jsonl" : fs::path();
}

void check_log_dir(const RunConfig& config) {
  if (config.log_dir.empty()) return;
  std::error_code error;
  fs::create_directories(config.log_dir, error);
  if (error) {
    throw UsageError(
        "--log-dir " + config.log_dir + ": cannot make this folder: " + error.message(),
        "choose a folder that you may write to");
  }
  tool::check_output_file("--log-dir", fs::path(config.log_dir) / "metrics.jsonl", "metrics.jsonl",
                          check_json_lines);
}

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

}  // namespace lockstep
