#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/recovery/elastic_job.h"
#include "lockstep/train/batch_feed.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/step_loop.h"
#include "lockstep/train/stop_agreement.h"
#include "lockstep/train/stop_signal.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

namespace detail {

/// In how many shares an epoch was cut that a checkpoint lies in, and how many of its samples were
/// done before: CheckpointInfo::values.
inline constexpr const char* kSharesOfEpoch = "epoch.shares";
inline constexpr const char* kSkippedOfEpoch = "epoch.skipped";

/// Each rank must see what its strategy wants it to see, or samples count twice. Throws UsageError
/// for a loader of another share. `use` is what the share is for: "this rank evaluates".
void check_share(const BatchFeed& feed, const DataShare& share, const std::string& use);

}  // namespace detail

/// One fit of a Trainer: epochs of the step loop, with an evaluation after each and the Trainer's
/// callbacks beside them. All ranks call alike.
class FitLoop {
 public:
  /// Moves the module to the world's device and makes optimizers and strategy. See Trainer::fit for
  /// what is checked and thrown. `callbacks` must outlive the loop.
  /// With a `job`, each step is committed, and `run` leaves the state after the last one to it.
  FitLoop(Trainer& trainer, detail::TrainTask task,
          const std::vector<std::shared_ptr<Callback>>& callbacks, ElasticJob* job = nullptr);

  FitResult run();
  /// Goes on from a checkpoint in `run`. Throws CheckpointError when the tensors do not fit.
  void restore(const StoredCheckpoint& checkpoint);
  /// See Trainer::load_optimizer.
  void load_optimizer(const StateDict& state) {
    detail::load_optimizer_state(loop_.parts(), state);
  }
  void save(CheckpointFolder& folder, CheckpointOverlap overlap, bool may_be_lost = false);
  void finish_saves();
  /// See StepLoop.
  void before_step(std::function<void(int64_t step)> call) { loop_.before_step(std::move(call)); }
  /// On the module as it is now. See lockstep::evaluate.
  Metrics evaluate(detail::BatchFeed& feed, const std::function<bool()>& go_on = {});
  StateDict model_state() { return detail::model_state(*task_.module, loop_.parts()); }

  TrainingModuleBase& module() { return *task_.module; }
  const StepLoop& steps() const { return loop_; }
  int64_t epoch() const { return epoch_; }
  int64_t total_steps() const { return loop_.total_steps(epoch_, batches_); }

 private:
  struct SavedFolder {
    bool seen_by_all;
    std::unique_ptr<CheckpointWriter> writer;
    bool may_be_lost = false;
  };
  SavedFolder& saved(const CheckpointFolder& folder);
  CheckpointShards shards_of(std::vector<TensorShard> model,
                             const std::vector<TensorShard>& optimizer,
                             std::vector<TensorShard> random, bool with_precision);
  CheckpointShards shards_to_save(bool seen_by_all);
  CheckpointInfo position(const MetricSums& epoch_sums) const;
  void keep_step();
  void leave_kept_state();
  int64_t first_batch_of(const CheckpointInfo& info, bool in_memory);
  FitResult run_to_end();
  void train();
  void after_step(const StepResult& result);
  void log_step(const StepResult& result);
  void collect_sums();
  void start_interval();
  std::vector<RankTimes> times_of_ranks();
  bool finish_epoch();
  bool validate();
  bool goes_on(int agreed);
  bool goes_on_now();
  bool wants_to_stop() const;
  bool is_signal_of_other_hosts() const;
  [[noreturn]] void interrupt();
  MetricSums reduced(const ShardSums& mine) const;
  double seconds() const;
  c10::Device device() const { return task_.train->device(); }

  Trainer& trainer_;
  const TrainerOptions& options_;
  ProcessGroup group_;
  detail::TrainTask task_;
  StepLoop loop_;
  const std::vector<std::shared_ptr<Callback>>& callbacks_;
  ElasticJob* const job_;
  const bool keeps_steps_;
  /// What an unfinished step and an evaluation may change, as it was after the last step.
  struct KeptStep {
    CheckpointInfo info;
    StateDict random;
    std::vector<at::Tensor> buffers;
  };
  std::optional<KeptStep> kept_;
  const StopSignal* signals_ = nullptr;  ///< While `run` runs.
  std::optional<StopAgreement> agreement_;
  int64_t epoch_ = 0;
  int64_t batches_ = 0;           ///< Of the epoch that are behind us.
  ShardSums log_sums_;            ///< This rank's, since the last log.
  int64_t logged_step_ = 0;       ///< Of the last log. Ranks may have sums or none, but all steps.
  ShardSums epoch_sums_;          ///< This rank's, of the epoch.
  int64_t restored_samples_ = 0;  ///< Of the epoch, made before the checkpoint.
  double log_start_ = 0;
  std::chrono::nanoseconds log_start_held_up_{0};  ///< By time_held_up().
  double epoch_start_ = 0;
  int stop_requested_ = 0;
  bool compares_times_ = false;  ///< Rank 0 has loggers.
  StepResult last_step_;
  Metrics validation_;
  std::map<std::filesystem::path, SavedFolder> saved_folders_;
  double save_seconds_ = 0;  ///< For which saves have held up this rank since the last log.
  StateDict random_state_;   ///< To be set when `run` begins.
  std::chrono::steady_clock::time_point start_;
};

}  // namespace lockstep
