#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/amp/precision.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_writer.h"
#include "lockstep/comm/world.h"
#include "lockstep/data/safetensors.h"
#include "lockstep/loggers/logger.h"
#include "lockstep/parallel/strategy.h"
#include "lockstep/train/batch_feed.h"
#include "lockstep/train/callback.h"

namespace lockstep {

class ElasticJob;

/// What happens when a loss or gradient is NaN or infinite. Every rank does the same.
enum class OnNan {
  stop,     ///< NumericError naming the step and the ranks.
  skip,     ///< The step is dropped on all ranks, with a warning: its gradients, and what it did
            ///< to buffers (batch norm's statistics). NumericError when all of an epoch are.
  proceed,  ///< Nothing is checked.
};

/// Histograms that loggers get every log_every_n_steps. They cost a pass over the tensors on rank
/// 0, which the others wait for.
struct LogHistograms {
  bool weights = false;    ///< Of the parameters that rank 0 has, by name.
  bool gradients = false;  ///< As rank 0 has them before clipping, times the loss scale, if any.
};

struct TrainerOptions {
  /// The default is enough for the small models on the small datasets.
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
  /// Where metrics go, besides callbacks: see Logger. Those of rank 0 are used, before
  /// callbacks are called. With any, the ranks also compare their times in each log: one more
  /// all-reduce. The splits are "train", "test", and "run" with the number of restarts.
  std::vector<std::shared_ptr<Logger>> loggers = {};
  LogHistograms log_histograms = {};
  /// What loggers are told of the run's configuration.
  std::map<std::string, std::string> hyperparameters = {};
  /// The default is to stop: a NaN never disappears by itself, and a run that goes on with it
  /// wastes hours.
  OnNan on_nan = OnNan::stop;
  /// The model's precision. The Trainer sets `precision.device`.
  PrecisionOptions precision = {};
  /// How the model is spread over ranks: see strategy_names().
  std::string strategy = "ddp";
  StrategyOptions strategy_options = {};
  /// What must be the same in a run that resumes: see CheckpointInfo::identity.
  std::map<std::string, std::string> identity = {};
  /// What a run that resumes may change, besides the number of ranks: see CheckpointInfo::settings.
  /// `Trainer::restore` warns of each difference.
  std::map<std::string, std::string> settings = {};
};

/// Trains modules over all ranks of a world: runs the training loop, evaluates after each epoch and
/// calls callbacks. The strategy, which spreads a module over the ranks, is an option. A saved
/// state resumes with the same bits, or with another strategy.
///
///     auto module = std::make_shared<Classifier>();  // see TrainingModule
///     lockstep::Trainer trainer(world, {.max_epochs = 3, .strategy = "fsdp"});
///     trainer.fit(module, std::move(train_loader), std::move(validation_loader));
///
/// Every rank makes one, adds its callbacks and calls `fit`. One thread at a time.
class Trainer {
 public:
  /// `world` must outlive the trainer. Throws UsageError for options out of range.
  explicit Trainer(const World& world, TrainerOptions options = {});
  ~Trainer();

  void add_callback(std::shared_ptr<Callback> callback);

  /// Trains the module on the batches of `train` to the last epoch, or until a callback wants to
  /// stop. After each epoch it is evaluated on those of `validation`. The loaders are moved in and
  /// must be made alike on all ranks: see BatchLoader. With StrategyOptions::logical_shards each is
  /// a vector, with a loader for each of this rank's shards: see LogicalShards.
  ///
  /// Modules are trained in the mode that they have, so a frozen part in evaluation mode stays in
  /// it, as in Lightning. A module that is in evaluation mode as a whole is trained in it, with a
  /// warning.
  ///
  /// The module comes to the world's device and gets rank 0's parameters. Throws UsageError for
  /// what the strategy cannot do with it, and MismatchError where ranks differ in their options,
  /// loaders or parameters.
  ///
  /// The signals INT, TERM, HUP, QUIT and USR1, and a closed standard output, end it. All ranks
  /// stop at the same step, or the same batch of an evaluation, within a fraction of a second and
  /// after at most 16 more of them. Then every rank calls the callbacks' on_interrupt and throws
  /// InterruptedError. If an evaluation was interrupted, a resumed run repeats it from its start.
  /// On several hosts, where ranks live on, those of hosts without the signal throw
  /// GenerationEnded.
  /// Throws NumericError (see OnNan), CommError and what callbacks throw.
  template <class M, class Train>
  requires BatchLoaders<Train, typename M::BatchType> FitResult fit(std::shared_ptr<M> module,
                                                                    Train train) {
    return fit(detail::train_task(module, std::move(train)));
  }
  template <class M, class Train, class Validation>
  requires BatchLoaders<Train, typename M::BatchType> &&
      BatchLoaders<Validation, typename M::BatchType>
          FitResult fit(std::shared_ptr<M> module, Train train, Validation validation) {
    return fit(detail::train_task(module, std::move(train), std::move(validation)));
  }

  /// The metrics of the module over all of `data`, of which the loader has this rank's share. If
  /// `fit` was called with the same module, it is evaluated as the strategy has spread it, else as
  /// it is. Every rank calls. Throws as `fit`.
  template <class M, class Data>
  requires BatchLoaders<Data, typename M::BatchType> Metrics
  validate(const std::shared_ptr<M>& module, Data data) {
    return validate(*module, *detail::feed_of(module, std::move(data)));
  }

  /// Lets the next `fit` go on from a checkpoint, of any strategy and number of ranks: each rank
  /// reads what it needs of it. Every rank calls with the same one. Warns if
  /// TrainerOptions::settings differ. `fit` throws CheckpointError if the tensors do not fit, and
  /// for a checkpoint within an epoch at a sample where no step of this run begins.
  void restore(StoredCheckpoint checkpoint);
  /// In the function that `job` runs, before its `fit`, of which there is one: that lives on when
  /// other ranks die. Each step is committed. In a later generation `fit` goes on after the last
  /// step that any living rank has finished; then returns where that is. A loader of a type of
  /// one's own may be asked to go on within an epoch only with as many ranks. Every rank calls.
  ///
  /// Ranks have all of that state with strategy ddp, without logical shards or a hook of your own,
  /// where a step is one update and one evaluation of the loss (not lbfgs). Else, and in the first
  /// generation, this returns none: then `restore` what was saved last, or training begins anew.
  /// The model is on the CPU.
  std::optional<CheckpointInfo> live_on(ElasticJob& job);
  /// Lets the next `fit` begin with this state of the optimizer, whole, as Optimizer::load_state
  /// takes it, or with "OPTIMIZER." before where there are several. Every rank calls with the same
  /// one. A checkpoint to go on from has its own. `fit` throws CheckpointError if it does not fit.
  void load_optimizer(StateDict state);

  // What follows is about the latest fit, and throws UsageError before one. Callbacks may call it.

  /// Saves the state after the last step: all parameters, all optimizers. Every rank calls, and
  /// writes what it has. Where some rank does not see the folder, rank 0 gathers all and writes.
  /// `folder` is used on rank 0 only. See CheckpointWriter for `overlap`, and for what becomes of a
  /// checkpoint that cannot be written.
  void save(CheckpointFolder& folder, CheckpointOverlap overlap = CheckpointOverlap::none);
  /// The same for a checkpoint that may be lost: while the one before is being written it is left
  /// out, and one that cannot be written is a warning only.
  void save_snapshot(CheckpointFolder& folder);
  /// Waits for what is being written behind training, as `fit` does when it ends. Every rank calls.
  /// Throws CheckpointError where a folder's newest checkpoint could not be written.
  void finish_saves();
  /// The module's parameters and buffers by name, whole: on rank 0, empty on the others. Every rank
  /// calls. Names are those of the optimizer's module, with "OPTIMIZER." before where there are
  /// several.
  StateDict model_state();
  /// Writes them as safetensors on rank 0. Every rank calls.
  void save_weights(const std::filesystem::path& path,
                    const std::map<std::string, std::string>& metadata = {});

  /// Steps done in the whole run, those that it will have unless it stops early, and completed
  /// epochs.
  int64_t global_step() const;
  int64_t total_steps() const;
  int64_t current_epoch() const;

  const World& world() const;
  const TrainerOptions& options() const;
  bool is_first_rank() const;

  /// The same for a task or feed whose batch type is erased.
  FitResult fit(detail::TrainTask task);
  Metrics validate(TrainingModuleBase& module, detail::BatchFeed& feed);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
