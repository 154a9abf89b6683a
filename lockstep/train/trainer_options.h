#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/amp/precision.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// What happens when a loss or gradient is NaN or infinite. Every rank does the same.
enum class OnNan {
  stop,     ///< NumericError naming the step and the ranks.
  skip,     ///< The step is dropped on all ranks, with a warning: its gradients, and what it did
            ///< to buffers (batch norm's statistics). NumericError when all of an epoch are.
  proceed,  ///< Nothing is checked.
};

struct TrainerOptions {
  /// Enough for the small models on the small data sets. Everything else is the user's to say.
  int64_t max_epochs = 5;
  /// Batches whose gradients are averaged before a step. 1: every batch is a step.
  int64_t accumulate_grad_batches = 1;
  /// Largest 2-norm of all gradients together; 0: no clipping, as in Lightning.
  double gradient_clip_val = 0;
  /// Batches of an epoch that each rank uses; 0: all.
  int64_t limit_train_batches = 0;
  /// The same for an evaluation; 0: all.
  int64_t limit_val_batches = 0;
  /// Metrics of training are reduced over ranks this often: one small all-reduce (0.2 ms over
  /// Gloo). 50 as in Lightning.
  int64_t log_every_n_steps = 50;
  /// A NaN never goes away by itself. A run that goes on with it only burns hours.
  OnNan on_nan = OnNan::stop;
  /// In which numbers the model computes. Its device is the Trainer's to set.
  PrecisionOptions precision = {};
  /// How the model is spread over ranks: see strategy_names().
  std::string strategy = "ddp";
  StrategyOptions strategy_options = {};
  /// What a checkpoint of this run belongs to besides the world size and the LibTorch: see
  /// CheckpointInfo::identity.
  std::map<std::string, std::string> identity = {};
  /// What a run that resumes may change: see CheckpointInfo::settings. `Trainer::restore` warns of
  /// each difference.
  std::map<std::string, std::string> settings = {};
};

}  // namespace lockstep
