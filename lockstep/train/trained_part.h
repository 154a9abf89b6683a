#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/amp/precision.h"
#include "lockstep/checkpoint/stored_checkpoint.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/train/finite_check.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_module.h"

namespace lockstep::detail {

/// One optimizer of a training run with its parameters: a strategy over them, a schedule, and the
/// check for NaN. Every rank calls alike.
class TrainedPart {
 public:
  /// A collective. `steps_of_run` is for schedules that span the run. `root` is the whole module,
  /// whose buffers a forward may change. `example_input`: see StrategySetup.
  TrainedPart(OptimizerConfig config, const std::shared_ptr<TrainingModuleBase>& root,
              const ProcessGroup& group, c10::Device device, const TrainerOptions& options,
              int64_t steps_of_run, const std::function<at::Tensor()>& example_input);

  const std::string& name() const { return config_.name; }
  const std::string& optimizer_name() const { return optimizer_name_; }
  double base_lr() const { return base_lr_; }
  const ScheduleOptions& schedule() const { return config_.schedule; }
  const torch::nn::Module& module() const { return *module_; }
  Strategy& strategy() { return *strategy_; }
  const Strategy& strategy() const { return *strategy_; }
  Precision& precision() { return precision_; }

  /// Before a batch of a step. Does nothing after the first.
  void begin_step();
  /// What backward is to start from, for the loss `value` of a batch: divided for accumulation and
  /// scaled; NaN where the loss is not finite.
  at::Tensor judged(at::Tensor loss, double value, int64_t batches_of_step);
  /// The loss of a step's batch, and how it and its gradients are computed once more.
  struct Evaluation {
    double loss;
    LossClosure again;
  };
  /// Clips and steps, or drops the step on all ranks. `step` and `epoch` are for messages.
  void finish_step(int64_t step, int64_t epoch, const Evaluation& evaluation);
  /// See FiniteCheck. `from_its_start` tells whether this run has made the whole epoch.
  void end_epoch(int64_t epoch, bool from_its_start);

  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

 private:
  void clip();
  void step_with(const Evaluation& evaluation);
  void check_closure() const;
  StrategySetup setup(const std::shared_ptr<TrainingModuleBase>& root, const ProcessGroup& group,
                      c10::Device device, const std::function<at::Tensor()>& example_input);

  OptimizerConfig config_;
  TrainerOptions options_;
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> buffers_;       ///< Of the whole root.
  std::vector<at::Tensor> kept_buffers_;  ///< As before the step, where it may be skipped.
  Precision precision_;
  std::string optimizer_name_;
  std::unique_ptr<Strategy> strategy_;
  FiniteCheck finite_;
  double base_lr_ = 0;
  int64_t updates_ = 0;
  int64_t updates_of_epoch_ = 0;
  bool in_step_ = false;
  bool evaluates_again_ = false;  ///< The optimizer asks for a loss within its step.
};

using TrainedParts = std::vector<std::unique_ptr<TrainedPart>>;

/// Makes the parts of what the module configures. A collective. Throws UsageError for optimizers
/// that cannot be told apart or share a parameter.
TrainedParts make_parts(const std::shared_ptr<TrainingModuleBase>& module,
                        const ProcessGroup& group, c10::Device device,
                        const TrainerOptions& options, int64_t steps_of_run,
                        const std::function<at::Tensor()>& example_input = {});

/// Makes the parameters of all parts but one need no gradient: Lightning's toggle_optimizer.
/// Returns those that needed one.
std::vector<at::Tensor> freeze_others(const TrainedParts& parts, const TrainedPart& one);

/// The whole run's tensors, on rank 0; empty on the others. Names are the module's own of the one
/// part, else "PART.NAME". What belongs to no part has the root's names. Collectives.
StateDict model_state(const TrainingModuleBase& root, const TrainedParts& parts);
StateDict optimizer_state(const TrainedParts& parts);
/// The model's, as this rank has it, where each has it whole. No collective.
StateDict own_model_state(const TrainingModuleBase& root, const TrainedParts& parts);
/// What this rank has of the same: see Strategy. Collectives.
std::vector<TensorShard> model_shards(const TrainingModuleBase& root, const TrainedParts& parts);
std::vector<TensorShard> optimizer_shards(const TrainedParts& parts);
/// What of them the load functions below look at on this rank.
WantedBoxes needed_of_model(const TrainedParts& parts);
WantedBoxes needed_of_optimizer(const TrainedParts& parts);
/// Of gradient scalers, by the same names, on every rank. No collective.
StateDict precision_state(const TrainedParts& parts);
/// The same, whole, on every rank. Throw CheckpointError where they do not fit.
void load_model_state(TrainingModuleBase& root, const TrainedParts& parts, const StateDict& state);
void load_optimizer_state(const TrainedParts& parts, const StateDict& state);
void load_precision_state(const TrainedParts& parts, const StateDict& state);

/// The root's parameters and buffers that belong to no part.
StateDict tensors_of_no_part(const TrainingModuleBase& root, const TrainedParts& parts);

}  // namespace lockstep::detail
