#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

/// Means over all ranks. A metric that was not logged is NaN, such as `accuracy` for regression.
struct Metrics {
  double loss = std::numeric_limits<double>::quiet_NaN();
  double accuracy = std::numeric_limits<double>::quiet_NaN();
  int64_t samples = 0;
  /// Other metrics that a TrainingModule logs, by name.
  std::map<std::string, double> values = {};
};

/// Where training stands after an optimizer step.
struct StepResult {
  int64_t step = 0;         ///< Optimizer steps done in the whole run, from 1.
  int64_t total_steps = 0;  ///< Those of the whole run, unless it stops early.
  int64_t epoch = 0;        ///< From 0.
  int64_t batches = 0;      ///< Batches of the epoch that this rank has used.
  int64_t samples = 0;      ///< Of this step, over all ranks.
  double lr = 0;            ///< The rate that the step was made with; of the first optimizer.
  /// Of this rank's last batch alone; a LogResult has that of all. NaN where the strategy computes
  /// it on another rank.
  double loss = 0;
  double seconds = 0;  ///< Since training began in this process.
  /// Of this step, what this rank itself took: with its data, without waits for other ranks.
  double own_seconds = 0;
};

/// Where a rank's time went since the last log, in seconds, and what it holds.
struct RankTimes {
  double data = 0;       ///< Until the loader gave a batch.
  double compute = 0;    ///< Forward and backward, without the waits in them.
  double optimizer = 0;  ///< Checks, clipping, the optimizer's step; without waits.
  double waiting = 0;    ///< For other ranks and their data: see time_held_up().
  double other = 0;      ///< Callbacks, logs and saves.
  double memory = 0;     ///< Bytes of this process in the host's memory.
};

/// Every `log_every_n_steps` steps.
struct LogResult {
  StepResult step;
  Metrics metrics;           ///< Of the steps since the last one, over all ranks.
  double samples_per_s = 0;  ///< Over all ranks, since the last one.
  double save_seconds = 0;   ///< For which saves of checkpoints held up this rank meanwhile.
  std::vector<RankTimes> ranks = {};  ///< By rank; empty where the Trainer has no loggers.
};

/// After each epoch and its evaluation.
struct EpochResult {
  int64_t epoch = 0;  ///< From 0.
  int64_t max_epochs = 0;
  int64_t step = 0;
  Metrics train;  ///< Over all steps of the epoch, with the weights as they were at each step.
  Metrics test;   ///< Of the held-out part, with the weights after the epoch.
  double lr = 0;
  double samples_per_s = 0;       ///< Of training, over all ranks.
  double test_samples_per_s = 0;  ///< Of the evaluation.
  double seconds = 0;             ///< Since training began in this process.
};

/// What became of a run.
struct FitResult {
  int64_t steps = 0;
  int64_t epochs = 0;
  Metrics test;  ///< The last evaluation.
  bool stopped_early = false;
  double seconds = 0;
};

class Trainer;

/// Code that runs at fixed points of training. A Trainer calls its callbacks in the order in which
/// they were added, on the training thread. A callback that communicates must be added on every
/// rank. One that only prints or writes is best added on rank 0 alone. What it throws ends the run.
class Callback {
 public:
  virtual ~Callback() = default;
  /// Before the first step of a fit, when everything is set up and a checkpoint's state is
  /// restored.
  virtual void on_start(Trainer& trainer) {}
  /// After every optimizer step, and after its `on_log` where there is one: keep it cheap.
  virtual void on_step(Trainer& trainer, const StepResult& result) {}
  /// Every log_every_n_steps and after an epoch's last step, with metrics reduced over all ranks.
  virtual void on_log(Trainer& trainer, const LogResult& result) {}
  virtual void on_epoch_end(Trainer& trainer, const EpochResult& result) {}
  /// The run ends before its last epoch because a signal asked for it. All ranks are at the same
  /// step. Afterwards `fit` throws: see Trainer::fit.
  virtual void on_interrupt(Trainer& trainer, int signal_number) {}
  virtual void on_end(Trainer& trainer, const FitResult& result) {}
  /// True to end the run after this epoch. Must be the same on all ranks.
  virtual bool wants_to_stop() const { return false; }

  /// The callback's own state, saved in checkpoints, under names that no other callback uses.
  virtual std::map<std::string, double> values() const { return {}; }
  virtual void load_values(const std::map<std::string, double>& values) {}
};

}  // namespace lockstep
