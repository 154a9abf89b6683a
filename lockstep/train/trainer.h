#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/world.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/train_task.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep {

/// Trains a model over all ranks of a world: epochs of the step loop, with an evaluation after each
/// and callbacks beside it. States can be saved, and training goes on from them to the same bits.
///
/// Every rank makes one, adds its callbacks and calls `fit`. One thread at a time.
class Trainer {
 public:
  /// `world` must outlive the trainer. Checks that all ranks have the same options and parameters,
  /// and gives them rank 0's parameters (see DistributedDataParallel). Throws UsageError for
  /// options out of range, MismatchError for those in which ranks differ.
  Trainer(const World& world, TrainTask task, TrainerOptions options);
  ~Trainer();

  void add_callback(std::shared_ptr<Callback> callback);

  /// Trains to the last epoch, or until a callback wants to stop. INT, TERM, HUP, QUIT and a closed
  /// standard output end it. All ranks agree on the step, or on the batch of an evaluation: within
  /// a fraction of a second, and at most 16 of them. Then the callbacks' on_interrupt is called and
  /// InterruptedError thrown, on every rank. After a resume an epoch whose evaluation was cut off
  /// is evaluated anew. Throws NumericError (see OnNan), CommError and what callbacks throw.
  FitResult fit();

  /// Goes on from a checkpoint in the following `fit`. Every rank calls with the same one. Warns of
  /// other TrainerOptions::settings. Throws CheckpointError when the tensors do not fit.
  void restore(const Checkpoint& checkpoint);
  /// Saves the state after the last step. Every rank calls, rank 0 writes. `folder` is used on rank
  /// 0 only.
  void save(CheckpointFolder& folder);

  Model& model();
  const World& world() const;
  const TrainerOptions& options() const;
  int64_t total_steps() const;
  bool is_first_rank() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
