#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/train/batch_feed.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/trained_part.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_context.h"

namespace lockstep {

/// Forward, backward, step, batch after batch: the inner loop of training, without anything that
/// only watches. How the model is spread over ranks is its strategy's matter. One thread. All ranks
/// call alike.
class StepLoop {
 public:
  /// Gets each step's result. False ends the epoch there. Called on every rank.
  using AfterStep = std::function<bool(const StepResult&)>;

  /// `task` must outlive the loop. A collective.
  StepLoop(detail::TrainTask& task, const ProcessGroup& group, const TrainerOptions& options);

  /// Lets the feed give batches in the dtype of the parameters.
  void cast_batches(detail::BatchFeed& feed) const;

  /// Trains from batch `first_batch` of the epoch to its end. False when `after_step` ended it.
  bool run_epoch(int64_t epoch, int64_t first_batch, const AfterStep& after_step);
  /// So many samples of the next epoch's order are done. False where the loader cannot skip them.
  bool skip(int64_t samples);
  /// All ranks' samples of the epoch that are done after so many of its batches; -1: not known.
  int64_t samples_after(int64_t batches) const;

  /// One forward and backward on zeros, without a step: see Strategy::warm_up. It lets a reducer
  /// find the order in which gradients arrive, as it does in a run's first step. Without it a
  /// resumed run would sum its first step's buckets in another order than the run that was not
  /// interrupted. That changes last bits with three ranks or more. Changes buffers and uses random
  /// numbers: restore after it.
  void warm_up();

  const detail::TrainedParts& parts() const { return parts_; }
  double lr() const { return parts_.front()->strategy().lr(); }
  int64_t step() const { return step_; }
  /// Of the whole run, as it looks after so many batches of the epoch.
  int64_t total_steps(int64_t epoch, int64_t batches) const;
  bool automatic() const { return automatic_; }
  /// What a resumed run needs besides the step: numbers by name, for a checkpoint.
  std::map<std::string, double> values() const;
  void load_values(int64_t step, const std::map<std::string, double>& values);
  int64_t batches_per_epoch() const;
  /// Called where all gradients of a step are there, before the optimizer's step; with automatic
  /// optimization only.
  void before_step(std::function<void(int64_t step)> call) { before_step_ = std::move(call); }
  /// This rank's times since the last call, without `other` and `waiting`.
  RankTimes take_times() { return std::exchange(times_, {}); }
  /// This rank's sums since the last call, over all batches of each of its shards.
  ShardSums take_sums() { return std::exchange(sums_, {}); }

 private:
  /// Of the last batch, over its parts where it comes in such.
  struct BatchLoss {
    double sum = 0;
    int64_t rows = 0;
    bool is_bad = false;  ///< It would hide that of all others.
    double mean() const { return sum / static_cast<double>(rows); }
  };
  int64_t steps_in(int64_t batches) const;
  void tell_if_evaluating();
  bool run_step(int64_t first, int64_t end);
  void run_batch(int64_t index, bool last_of_step);
  double loss_once_more(detail::TrainedPart& part, const BatchWork& work);
  BatchWork work_of(int64_t index, bool last_of_step);
  /// Throws UsageError for a name that no optimizer has. Empty stands for the only one.
  detail::TrainedPart& part_named(const std::string& name) const;
  at::Tensor judged(detail::TrainedPart& part, const at::Tensor& loss, int64_t rows);
  void note_batch();
  double update(const std::string& name, const std::function<at::Tensor()>& loss,
                bool last_of_step);
  StepResult result_of(int64_t epoch, int64_t batches);
  double own_seconds() const;
  void count(double& part);

  detail::TrainTask& task_;
  TrainerOptions options_;
  bool automatic_;
  SupervisedModule* supervised_;
  int64_t skipped_ = 0;      ///< Samples of the epoch.
  int64_t steps_of_epoch_;   ///< Of a whole one.
  int64_t total_steps_ = 0;  ///< Of the run.
  detail::TrainedParts parts_;
  int shares_;  ///< Into how many different parts the data is cut.
  detail::TrainingContext context_;
  size_t shard_ = 0;  ///< Of this rank's logical shards; without them there is one.
  bool warming_up_ = false;
  bool told_evaluating_ = false;
  int64_t step_ = 0;
  int64_t batches_of_step_ = 1;
  int64_t samples_of_step_ = 0;
  BatchLoss loss_;
  ShardSums sums_;
  std::chrono::steady_clock::time_point start_;
  double step_start_ = 0;  ///< By `own_seconds`.
  double part_start_ = 0;  ///< By `own_seconds`, what `count` counts from.
  RankTimes times_;
  std::function<void(int64_t)> before_step_;
};

}  // namespace lockstep
