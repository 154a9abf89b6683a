#include "tools/lockstep/train/metrics_file.h"

#include <fcntl.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
using nlohmann::json;
using nlohmann::ordered_json;
namespace {

ordered_json number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json();
}

ordered_json row_of(int64_t step, int64_t epoch, const char* split, const Metrics& metrics,
                    double lr, double samples_per_s, double seconds) {
  return {{"step", step},
          {"epoch", epoch + 1},
          {"split", split},
          {"loss", number(metrics.loss)},
          {"accuracy", number(metrics.accuracy)},
          {"lr", lr},
          {"samples_per_s", std::round(samples_per_s)},
          {"seconds", std::round(seconds * 1e3) / 1e3}};
}

/// A run that was killed may have written rows of steps that are now made again.
std::string rows_up_to(const std::string& text, int64_t step, int64_t epochs) {
  std::string kept;
  for (const std::string& line : split(text, '\n')) {
    const json row = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!row.is_object()) continue;
    const bool of_step = row.value("split", "") == "train";
    const bool past =
        of_step ? row.value("step", int64_t{0}) > step : row.value("epoch", int64_t{0}) > epochs;
    if (!past) kept += line + "\n";
  }
  return kept;
}

}  // namespace

MetricsFile::MetricsFile(const std::filesystem::path& path, bool resumed, int64_t step,
                         int64_t epochs)
    : path_(path) {
  std::string kept;
  if (resumed && std::filesystem::exists(path)) kept = rows_up_to(read_file(path), step, epochs);
  fd_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd_) {
    throw SystemError("cannot write metrics file " + path.string(), errno,
                      "check that its folder exists and that you may write there");
  }
  write_all(fd_.get(), kept.data(), kept.size(), path_);
}

void MetricsFile::write(const ordered_json& row) {
  const std::string line = row.dump() + "\n";
  write_all(fd_.get(), line.data(), line.size(), path_);
}

void MetricsFile::on_log(Trainer& trainer, const LogResult& result) {
  const StepResult& step = result.step;
  write(row_of(step.step, step.epoch, "train", result.metrics, step.lr, result.samples_per_s,
               step.seconds));
}

void MetricsFile::on_epoch_end(Trainer& trainer, const EpochResult& result) {
  write(row_of(result.step, result.epoch, "test", result.test, result.lr, result.test_samples_per_s,
               result.seconds));
}

}  // namespace lockstep
