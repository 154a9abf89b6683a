#include "tools/lockstep/train/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "lockstep/base/text.h"
#include "lockstep/train/progress_text.h"
#include "lockstep/train/trainer.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kRedraw{100};

}  // namespace

std::string outcome_line(const Metrics& test) {
  const std::string loss = "loss " + four_digits(test.loss);
  if (std::isnan(test.accuracy)) return "test " + loss;
  return "test accuracy " + four_digits(test.accuracy) + " " + loss;
}

std::string progress_bar(const std::string& label, double done, const std::string& facts, int width,
                         bool color) {
  char percent[16];
  std::snprintf(percent, sizeof percent, " %3.0f%%  ", std::floor(100 * done));
  const int room = width - 1 - static_cast<int>(label.size() + facts.size()) - 10;
  if (room < 5) {
    return (label + percent + facts).substr(0, static_cast<size_t>(std::max(width - 1, 0)));
  }
  const int cells = std::min(room, 40);
  const int full = std::clamp(static_cast<int>(done * cells), 0, cells);
  std::string inside(static_cast<size_t>(full), '=');
  if (full < cells) inside += '>';
  inside.resize(static_cast<size_t>(cells), ' ');
  if (color) inside = "\x1b[32m" + inside + "\x1b[0m";
  return label + " [" + inside + "]" + percent + facts;
}

void Progress::on_start(Trainer& trainer) {
  max_epochs_ = trainer.options().max_epochs;
}

std::string Progress::bar(const StepResult& result) const {
  const auto left = static_cast<double>(result.total_steps - result.step);
  const auto made = static_cast<double>(result.step - first_step_);
  const bool logged = last_log_.step.step > 0;
  std::string facts;
  if (logged || !std::isnan(result.loss)) {
    facts = "loss " + four_digits(logged ? last_log_.metrics.loss : result.loss) + "  ";
  }
  facts += speed_text(logged ? last_log_.samples_per_s
                             : static_cast<double>(samples_) / std::max(result.seconds, 1e-9));
  facts += "  ETA " + human_seconds(result.seconds / made * left);
  const double done = static_cast<double>(result.step) / static_cast<double>(result.total_steps);
  return progress_bar(epoch_text(result.epoch, max_epochs_), done, facts, console_.width(),
                      console_.has_color());
}

void Progress::on_step(Trainer& trainer, const StepResult& result) {
  samples_ += result.samples;
  if (first_step_ < 0) first_step_ = result.step - 1;
  if (!console_.is_live()) return;
  const auto now = Clock::now();
  if (now - drawn_ < kRedraw) return;
  drawn_ = now;
  console_.live(bar(result));
}

void Progress::on_log(Trainer& trainer, const LogResult& result) {
  last_log_ = result;
  if (!console_.is_live()) PrintProgress::on_log(trainer, result);
}

void Progress::on_end(Trainer& trainer, const FitResult& result) {
  console_.clear_live();
}

}  // namespace lockstep
