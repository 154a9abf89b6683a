#pragma once

#include <chrono>
#include <string>

#include "lockstep/train/callbacks.h"
#include "tools/lockstep/train/console.h"

namespace lockstep {

/// "test accuracy 0.9731 loss 0.0912"; for regression "test loss 0.0912".
std::string outcome_line(const Metrics& test);

/// PrintProgress on a console. On a terminal a live bar is in place of the lines for logs. Until
/// the first log the bar has rank 0's own loss.
class Progress : public PrintProgress {
 public:
  /// `console` must outlive it.
  explicit Progress(Console& console)
      : PrintProgress([&console](const std::string& line) { console.line(line); }),
        console_(console) {}
  void on_start(Trainer& trainer) override;
  void on_step(Trainer& trainer, const StepResult& result) override;
  void on_log(Trainer& trainer, const LogResult& result) override;
  void on_end(Trainer& trainer, const FitResult& result) override;

 private:
  using Clock = std::chrono::steady_clock;
  std::string bar(const StepResult& result) const;

  Console& console_;
  int64_t max_epochs_ = 0;
  int64_t first_step_ = -1;  ///< Done before this process began.
  int64_t samples_ = 0;      ///< Of all ranks, since the process began to train.
  LogResult last_log_;
  Clock::time_point drawn_;
};

/// The bar itself, for a terminal of so many columns: "epoch 2/5 [=====>    ]  52%  loss 0.1234
/// 12345 samples/s  ETA 12.3s". At most `width` - 1 characters, colour codes not counted.
std::string progress_bar(const std::string& label, double done, const std::string& facts, int width,
                         bool color);

}  // namespace lockstep
