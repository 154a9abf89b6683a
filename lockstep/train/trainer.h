#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/metric_reduction.h"
#include "lockstep/train/step_loop.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep {

/// Trains a model over all ranks of a world: epochs of the step loop, an evaluation after each,
/// callbacks beside it, and states that can be saved and gone on from to the same bits.
///
/// Every rank makes one, adds its callbacks and calls `fit`; one thread at a time.
class Trainer {
 public:
  /// `world` must outlive the trainer. Checks that all ranks have the same parameters and gives
  /// them rank 0's (see DistributedDataParallel). Throws UsageError for options out of range.
  Trainer(const World& world, TrainTask task, TrainerOptions options);
  ~Trainer();

  void add_callback(std::shared_ptr<Callback> callback);

  /// Trains to the last epoch, or until a callback wants to stop. INT, TERM, HUP and a closed
  /// standard output end it at a step on which all ranks agree, within a fraction of a second: the
  /// callbacks' on_interrupt is called, then InterruptedError thrown, on every rank. Throws
  /// NumericError (see OnNan), CommError and what callbacks throw.
  FitResult fit();

  /// Goes on from a checkpoint in the following `fit`. Every rank calls with the same one. Throws
  /// CheckpointError when the tensors do not fit.
  void restore(const Checkpoint& checkpoint);
  /// Saves the state after the last step; every rank calls, rank 0 writes. `folder` is used on rank
  /// 0 only.
  void save(CheckpointFolder& folder);

  Model& model() { return *task_.model; }
  const World& world() const { return world_; }
  const TrainerOptions& options() const { return options_; }
  int64_t total_steps() const { return loop_.total_steps(); }
  bool is_first_rank() const { return world_.rank() == 0; }

 private:
  void after_step(const StepResult& result);
  void log_step(const StepResult& result);
  void collect_sums();
  void finish_epoch();
  bool wants_to_stop() const;
  [[noreturn]] void interrupt(int signal_number);
  double seconds() const;

  const World& world_;
  TrainTask task_;
  TrainerOptions options_;
  StepLoop loop_;
  std::unique_ptr<StopAgreement> agreement_;
  std::vector<std::shared_ptr<Callback>> callbacks_;
  int64_t epoch_ = 0;
  int64_t batches_ = 0;           ///< Of the epoch that are behind us.
  MetricSums log_sums_;           ///< This rank's, since the last log.
  MetricSums epoch_sums_;         ///< This rank's, of the epoch.
  int64_t restored_samples_ = 0;  ///< Of the epoch, made before the checkpoint.
  double log_start_ = 0;
  double epoch_start_ = 0;
  int stop_requested_ = 0;
  StepResult last_step_;
  Metrics test_;
  NamedTensors random_state_;  ///< To be set when `fit` begins.
  std::chrono::steady_clock::time_point start_;
};

}  // namespace lockstep
