#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/parallel/ddp.h"
#include "lockstep/train/finite_check.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/train_task.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep {

/// Forward, backward, step, batch after batch: the inner loop of training, without anything that
/// only watches. With several ranks the model is wrapped in DistributedDataParallel. A group of one
/// does without, to the same bits. One thread. All ranks call alike.
class StepLoop {
 public:
  /// Gets each step's result. False ends the epoch there. Called on every rank.
  using AfterStep = std::function<bool(const StepResult&)>;

  /// `task` must outlive the loop.
  StepLoop(TrainTask& task, const ProcessGroup& group, const TrainerOptions& options);

  /// Trains from batch `first_batch` of the epoch to its end. False when `after_step` ended it.
  bool run_epoch(int64_t epoch, int64_t first_batch, const AfterStep& after_step);

  /// One forward and backward on zeros, without a step. It lets the Reducer find the order in which
  /// gradients arrive, as it does in a run's first step. Without it a resumed run would sum its
  /// first step's buckets in another order than the run that was not interrupted. That changes last
  /// bits with three ranks or more. Changes buffers and uses random numbers: restore after it.
  void warm_up_reducer();

  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }
  int64_t batches_per_epoch() const;
  int64_t steps_per_epoch() const;
  int64_t total_steps() const { return steps_per_epoch() * options_.max_epochs; }
  /// This rank's sums since the last call, over all batches.
  MetricSums take_sums();
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  void accumulate(const Batch& batch, int64_t batches_of_step);
  void forward_and_backward(const Batch& batch, int64_t batches_of_step);
  void update(int64_t epoch);
  void keep_buffers();
  void put_buffers_back();

  TrainTask& task_;
  ProcessGroup group_;
  const TrainerOptions& options_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor>
      kept_buffers_;  ///< As before the step in progress, where it may be skipped.
  std::unique_ptr<DistributedDataParallel<std::shared_ptr<Model>>> ddp_;
  FiniteCheck finite_;
  ScheduleOptions schedule_;
  double base_lr_;
  int64_t step_ = 0;
  int64_t samples_of_step_ = 0;
  double last_loss_ = 0;
  MetricSums sums_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace lockstep
