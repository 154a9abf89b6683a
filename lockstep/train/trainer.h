#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/train_task.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep {

/// Trains a module over all ranks of a world: epochs of the step loop, with an evaluation after
/// each and callbacks beside it. How the module is spread over the ranks is an option. States can
/// be saved, and training goes on from them to the same bits, also with another strategy.
///
///     auto module = std::make_shared<Classifier>();  // see TrainingModule
///     lockstep::Trainer trainer(world, lockstep::training_task(module, std::move(train_loader),
///                                                              std::move(test_loader)),
///                               {.max_epochs = 3, .strategy = "fsdp"});
///     trainer.fit();
///
/// Every rank makes one, adds its callbacks and calls `fit`. One thread at a time.
class Trainer {
 public:
  /// `world` must outlive the trainer. Moves the module to the world's device. Checks that all
  /// ranks have the same options and parameters, and gives them rank 0's parameters. Throws
  /// UsageError for options out of range and for what the strategy cannot do with the module,
  /// MismatchError for what ranks differ in.
  Trainer(const World& world, TrainTask task, TrainerOptions options = {});
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
  /// Saves the state after the last step: all parameters, all optimizers. Every rank calls, rank 0
  /// writes. `folder` is used on rank 0 only.
  void save(CheckpointFolder& folder);
  /// The module's parameters and buffers by name, whole: on rank 0, empty on the others. Every rank
  /// calls. Names are those of the optimizer's module, with "OPTIMIZER." before where there are
  /// several.
  NamedTensors model_state();
  /// Writes them as safetensors on rank 0. Every rank calls.
  void save_weights(const std::filesystem::path& path,
                    const std::map<std::string, std::string>& metadata = {});

  TrainingModuleBase& module();
  /// Of the optimizer of that name; empty for the only one.
  const Strategy& strategy(const std::string& optimizer = {}) const;
  const World& world() const;
  const TrainerOptions& options() const;
  int64_t total_steps() const;
  bool is_first_rank() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
