#pragma once

#include <map>
#include <string>

#include "lockstep/train/training_results.h"

namespace lockstep {

class Trainer;

/// Something that goes on beside training. A Trainer calls its callbacks in the order in which they
/// were added, on the training thread. A callback that communicates must be added on every rank.
/// One that only prints or writes is best added on rank 0 alone. What it throws ends the run.
class Callback {
 public:
  virtual ~Callback() = default;
  /// Before the first step of a fit, when all is made and what a checkpoint holds is restored.
  virtual void on_start(Trainer& trainer) {}
  /// After every optimizer step, and after its `on_log` where there is one: keep it cheap.
  virtual void on_step(Trainer& trainer, const StepResult& result) {}
  /// Every log_every_n_steps and after an epoch's last step, with metrics reduced over all ranks.
  virtual void on_log(Trainer& trainer, const LogResult& result) {}
  virtual void on_epoch_end(Trainer& trainer, const EpochResult& result) {}
  /// The run ends before its last epoch because a signal asked for it. All ranks are at the same
  /// step. Afterwards `fit` throws InterruptedError.
  virtual void on_interrupt(Trainer& trainer, int signal_number) {}
  virtual void on_end(Trainer& trainer, const FitResult& result) {}
  /// True to end the run after this epoch. Must be the same on all ranks.
  virtual bool wants_to_stop() const { return false; }

  /// Numbers that a checkpoint keeps for it, by names that no other callback uses.
  virtual std::map<std::string, double> values() const { return {}; }
  virtual void load_values(const std::map<std::string, double>& values) {}
};

}  // namespace lockstep
