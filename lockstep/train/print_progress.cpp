#include <cmath>
#include <cstdio>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/train/callbacks.h"
#include "lockstep/train/progress_text.h"
#include "lockstep/train/trainer.h"

namespace lockstep {
namespace {

/// Of a module that logs no loss, but other metrics, without the loss.
std::string metrics_text(const Metrics& metrics, OnNan on_nan) {
  const bool has_others = !std::isnan(metrics.accuracy) || !metrics.values.empty();
  std::string text;
  const auto add = [&](const std::string& name, double value) {
    text += (text.empty() ? "" : "  ") + name + " " + four_digits(value);
  };
  // Only where NaN may be a result it is not just a loss that nobody has logged.
  if (!std::isnan(metrics.loss) || !has_others || on_nan == OnNan::proceed)
    add("loss", metrics.loss);
  if (!std::isnan(metrics.accuracy)) add("accuracy", metrics.accuracy);
  for (const auto& [name, value] : metrics.values) add(name, value);
  return text;
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

void print_line(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

}  // namespace

std::string four_digits(double value) {
  if (std::isnan(value)) return "nan";
  char text[64];
  std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

std::string epoch_text(int64_t epoch, int64_t max_epochs) {
  return "epoch " + std::to_string(epoch + 1) + "/" + std::to_string(max_epochs);
}

std::string speed_text(double samples_per_s) {
  return std::to_string(std::llround(samples_per_s)) + " samples/s";
}

PrintProgress::PrintProgress(Print print) : print_(print ? std::move(print) : print_line) {}

void PrintProgress::on_log(Trainer& trainer, const LogResult& result) {
  const StepResult& step = result.step;
  const TrainerOptions& options = trainer.options();
  // The rest of an epoch is told by the epoch's own line.
  if (!trainer.is_first_rank() || step.step % options.log_every_n_steps != 0) return;
  print_(epoch_text(step.epoch, options.max_epochs) + "  step " + std::to_string(step.step) + "/" +
         std::to_string(step.total_steps) + "  " + metrics_text(result.metrics, options.on_nan) +
         "  lr " + short_number(step.lr) + "  " + speed_text(result.samples_per_s));
}

void PrintProgress::on_epoch_end(Trainer& trainer, const EpochResult& result) {
  if (!trainer.is_first_rank()) return;
  const OnNan on_nan = trainer.options().on_nan;
  const bool tested = result.test.samples > 0;
  print_(epoch_text(result.epoch, result.max_epochs) + "  train " +
         metrics_text(result.train, on_nan) +
         (tested ? "  test " + metrics_text(result.test, on_nan) : "") + "  " +
         speed_text(result.samples_per_s) + "  " + human_seconds(result.seconds));
}

void PrintProgress::on_interrupt(Trainer& trainer, int signal_number) {
  if (!trainer.is_first_rank()) return;
  print_(std::string(InterruptedError(signal_number).what()) + " after step " +
         std::to_string(trainer.global_step()));
}

}  // namespace lockstep
