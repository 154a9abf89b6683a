#pragma once

#include "lockstep/train/callback.h"
#include "lockstep/train/trained_part.h"
#include "lockstep/train/trainer.h"

namespace lockstep::detail {

/// Tells a Trainer's loggers how a fit goes. On rank 0, before all other callbacks.
class LogToLoggers : public Callback {
 public:
  /// `options` must outlive it.
  explicit LogToLoggers(const TrainerOptions& options) : options_(options) {}
  void on_start(Trainer& trainer) override;
  void on_log(Trainer& trainer, const LogResult& result) override;
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override;

  /// A fit of these parts, which must outlive it, is to start. Ranks have started again so often.
  void prepare(const TrainedParts& parts, int64_t restarts) {
    parts_ = &parts;
    restarts_ = restarts;
  }
  /// Where all gradients of a step are there.
  void before_step(int64_t step);
  /// The fit has ended; of what, where it failed.
  void close(const std::string& failure);

 private:
  void log_histograms(int64_t step, bool gradients);

  const TrainerOptions& options_;
  const TrainedParts* parts_ = nullptr;
  int64_t restarts_ = 0;
  size_t begun_ = 0;  ///< So many loggers, in order. Others are not to be opened for a failure.
};

}  // namespace lockstep::detail
