#include "lockstep/train/log_to_loggers.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace lockstep::detail {
namespace {

double rounded(double value, double places) {
  return std::round(value * places) / places;
}

/// In the order in which rows of JSON have them.
MetricValues values_of(int64_t epoch, const Metrics& metrics, double lr, double samples_per_s,
                       double seconds) {
  MetricValues values{{"epoch", static_cast<double>(epoch + 1)},
                      {"loss", metrics.loss},
                      {"accuracy", metrics.accuracy},
                      {"lr", lr},
                      {"samples_per_s", std::round(samples_per_s)},
                      {"seconds", rounded(seconds, 1e3)}};
  const size_t own = values.size();
  for (const auto& [name, value] : metrics.values) {
    const bool is_taken = std::any_of(values.begin(), values.begin() + static_cast<long>(own),
                                      [&](const auto& one) { return one.first == name; });
    if (!is_taken) values.emplace_back(name, value);
  }
  return values;
}

}  // namespace

void LogToLoggers::on_start(Trainer& trainer) {
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  begun_ = 0;
  for (const auto& logger : options_.loggers) {
    logger->begin(trainer.global_step(), trainer.current_epoch());
    ++begun_;
    logger->log(trainer.global_step(),
                {{"unix_time", rounded(now, 1)},
                 {"ranks", static_cast<double>(trainer.world().size())},
                 {"restarts", static_cast<double>(restarts_)}},
                "run");
    if (!options_.hyperparameters.empty()) logger->log_hyperparameters(options_.hyperparameters);
  }
}

void LogToLoggers::on_log(Trainer& trainer, const LogResult& result) {
  const StepResult& step = result.step;
  MetricValues values =
      values_of(step.epoch, result.metrics, step.lr, result.samples_per_s, step.seconds);
  if (result.save_seconds > 0)
    values.emplace_back("save_seconds", rounded(result.save_seconds, 1e6));
  std::vector<MetricValues> ranks;
  for (const RankTimes& times : result.ranks) {
    ranks.push_back({{"data_s", rounded(times.data, 1e6)},
                     {"compute_s", rounded(times.compute, 1e6)},
                     {"optimizer_s", rounded(times.optimizer, 1e6)},
                     {"waiting_s", rounded(times.waiting, 1e6)},
                     {"other_s", rounded(times.other, 1e6)},
                     {"memory_bytes", times.memory}});
  }
  for (const auto& logger : options_.loggers) {
    logger->log(step.step, values, "train");
    logger->log_ranks(step.step, ranks);
  }
  if (options_.log_histograms.weights) log_histograms(step.step, /*gradients=*/false);
}

void LogToLoggers::on_epoch_end(Trainer& trainer, const EpochResult& result) {
  if (result.test.samples == 0) return;
  for (const auto& logger : options_.loggers) {
    logger->log(
        result.step,
        values_of(result.epoch, result.test, result.lr, result.test_samples_per_s, result.seconds),
        "test");
    logger->flush();
  }
}

void LogToLoggers::before_step(int64_t step) {
  const bool wanted = options_.log_histograms.gradients && step % options_.log_every_n_steps == 0;
  if (wanted) log_histograms(step, /*gradients=*/true);
}

void LogToLoggers::log_histograms(int64_t step, bool gradients) {
  for (const auto& part : *parts_) {
    const std::string prefix =
        (gradients ? "gradients/" : "weights/") + (parts_->size() > 1 ? part->name() + "." : "");
    for (const auto& item : part->module().named_parameters()) {
      const at::Tensor& values = gradients ? item.value().grad() : item.value();
      if (!values.defined() || values.numel() == 0) continue;
      for (const auto& logger : options_.loggers)
        logger->log_histogram(step, prefix + item.key(), values);
    }
  }
}

void LogToLoggers::close(const std::string& failure) {
  for (size_t i = 0; i < begun_; ++i) options_.loggers[i]->close(failure);
}

}  // namespace lockstep::detail
