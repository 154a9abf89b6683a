#include "lockstep/train/fit_loop.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/random_state.h"
#include "lockstep/train/same_settings.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Names in a checkpoint.
constexpr const char* kEpoch = "epoch.";
constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kPrecision = "precision.";

template <class T>
std::string exact_text(const T& value) {
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<double>::max_digits10) << value;
  return text.str();
}

/// What every rank must have alike to make the same collective calls, or to learn the same.
Settings settings_of_all_ranks(const TrainerOptions& options, const detail::TrainTask& task) {
  Settings settings{{"strategy", options.strategy},
                    {"precision", options.precision.precision},
                    {"amp_level", options.precision.amp_level},
                    {"loss_scale", options.precision.loss_scale}};
  const auto set = [&](const std::string& name, auto value) { settings[name] = exact_text(value); };
  set("max_epochs", options.max_epochs);
  set("accumulate_grad_batches", options.accumulate_grad_batches);
  set("gradient_clip_val", options.gradient_clip_val);
  set("limit_train_batches", options.limit_train_batches);
  set("limit_val_batches", options.limit_val_batches);
  set("log_every_n_steps", options.log_every_n_steps);
  constexpr const char* kPolicies[] = {"stop", "skip", "proceed"};
  set("on_nan", kPolicies[static_cast<int>(options.on_nan)]);
  set("batches of an epoch", task.train->batches_per_epoch());
  set("batches of an evaluation", task.validation ? task.validation->batches_per_epoch() : 0);
  if (const SamplerOptions* sampler = task.train->sampler()) {
    set("seed of the sampler", sampler->seed);
  }
  return settings;
}

/// The same of the optimizers, which are known only when they are made.
Settings settings_of_parts(const detail::TrainedParts& parts) {
  Settings settings;
  for (const auto& part : parts) {
    const std::string prefix = part->name().empty() ? "" : part->name() + ".";
    const ScheduleOptions& schedule = part->schedule();
    const auto set = [&](const char* name, auto value) {
      settings[prefix + name] = exact_text(value);
    };
    set("optimizer", part->optimizer_name());
    set("lr", part->base_lr());
    set("schedule", schedule.name);
    set("schedule.warmup_steps", schedule.warmup_steps);
    set("schedule.total_steps", schedule.total_steps);
    set("schedule.step_size", schedule.step_size);
    set("schedule.gamma", schedule.gamma);
    set("schedule.min_lr", schedule.min_lr);
  }
  return settings;
}

void check_module(const detail::TrainTask& task, const TrainerOptions& options) {
  if (!task.module) throw UsageError("Trainer::fit was given no module");
  if (!task.module->automatic_optimization() && options.accumulate_grad_batches > 1) {
    throw UsageError("accumulate_grad_batches is " +
                         std::to_string(options.accumulate_grad_batches) +
                         ", but the module calls update itself",
                     "call accumulate in its training_step for the batches before an update");
  }
}

/// Before the first collective call that depends on them.
detail::TrainTask ready(detail::TrainTask task, const Trainer& trainer) {
  const World& world = trainer.world();
  const TrainerOptions& options = trainer.options();
  check_module(task, options);
  check_same_settings(settings_of_all_ranks(options, task), world.group());
  const DataShare share =
      data_share(options.strategy, options.strategy_options, world.rank(), world.size());
  for (detail::BatchFeed* const feed : {task.train.get(), task.validation.get()}) {
    if (!feed) continue;
    detail::check_share(*feed, share, "with strategy " + options.strategy + " this rank trains on");
    feed->move_to(world.device());
  }
  task.module->to(world.device());
  return task;
}

}  // namespace

void detail::check_share(const BatchFeed& feed, const DataShare& share, const std::string& use) {
  const SamplerOptions* const sampler = feed.sampler();
  if (!sampler || (sampler->rank == share.rank && sampler->world_size == share.size)) return;
  throw UsageError("a loader's sampler has rank " + std::to_string(sampler->rank) + " of " +
                       std::to_string(sampler->world_size) + "; " + use + " share " +
                       std::to_string(share.rank) + " of " + std::to_string(share.size),
                   "make the sampler from lockstep::data_share(strategy, options, rank, size)");
}

FitLoop::FitLoop(Trainer& trainer, detail::TrainTask task,
                 const std::vector<std::shared_ptr<Callback>>& callbacks)
    : trainer_(trainer),
      options_(trainer.options()),
      group_(trainer.world().group()),
      task_(ready(std::move(task), trainer)),
      loop_(task_, group_, options_),
      callbacks_(callbacks),
      start_(Clock::now()) {
  check_same_settings(settings_of_parts(loop_.parts()), group_);
  const std::string slow = loop_.parts().front()->precision().slow_because();
  if (trainer.is_first_rank() && !slow.empty()) log_warning(slow);
}

FitResult FitLoop::run() {
  const StopSignal signals;
  signals_ = &signals;
  agreement_.emplace(group_, device());
  start_ = Clock::now();
  logged_step_ = loop_.step();
  if (!random_state_.empty()) set_random_state(random_state_, device());
  for (const auto& callback : callbacks_) callback->on_start(trainer_);
  try {
    train();
  } catch (const CommError&) {
    // The other ranks got the signal too, and one of them is gone already.
    if (signals.received() != 0) throw InterruptedError(signals.received());
    throw;
  }
  FitResult result;
  result.steps = loop_.step();
  result.epochs = epoch_;
  result.test = validation_;
  result.stopped_early = epoch_ < options_.max_epochs;
  result.seconds = seconds();
  for (const auto& callback : callbacks_) callback->on_end(trainer_, result);
  finish_saves();
  if (signals.received() != 0) throw InterruptedError(signals.received());
  return result;
}

void FitLoop::train() {
  // A stage of a pipeline has work of its own.
  const bool alike = loop_.parts().front()->strategy().data_share().size == group_.size();
  while (epoch_ < options_.max_epochs && !wants_to_stop()) {
    epoch_start_ = log_start_ = seconds();
    const bool whole = loop_.run_epoch(epoch_, batches_, [&](const StepResult& result) {
      after_step(result);
      return goes_on(agreement_->after_step(signals_->received(), alike ? result.own_seconds : 0));
    });
    if (whole && goes_on_now() && finish_epoch()) goes_on_now();
    if (stop_requested_ != 0) interrupt();
  }
  if (task_.validation && validation_.samples == 0 && !validate()) interrupt();
}

/// Notes what the ranks have agreed on; 0 is to go on.
bool FitLoop::goes_on(int agreed) {
  stop_requested_ = agreed;
  return agreed == 0;
}

bool FitLoop::goes_on_now() {
  return goes_on(agreement_->now(signals_->received()));
}

void FitLoop::after_step(const StepResult& result) {
  batches_ = result.batches;
  last_step_ = result;
  // Logged first: a checkpoint of this step must not be on the disk before the step's own row is.
  if (result.step % options_.log_every_n_steps == 0) log_step(result);
  for (const auto& callback : callbacks_) callback->on_step(trainer_, result);
}

void FitLoop::collect_sums() {
  const MetricSums sums = loop_.take_sums();
  log_sums_.add(sums);
  epoch_sums_.add(sums);
}

void FitLoop::log_step(const StepResult& result) {
  collect_sums();
  logged_step_ = result.step;
  LogResult log;
  log.step = result;
  log.metrics = reduced(std::exchange(log_sums_, {}));
  log.save_seconds = std::exchange(save_seconds_, 0);
  const double now = seconds();
  log.samples_per_s = static_cast<double>(log.metrics.samples) / std::max(now - log_start_, 1e-9);
  log_start_ = now;
  for (const auto& callback : callbacks_) callback->on_log(trainer_, log);
}

/// False when a signal ended the evaluation: the epoch is to be finished after a resume.
bool FitLoop::finish_epoch() {
  collect_sums();
  if (loop_.step() > logged_step_) log_step(last_step_);
  EpochResult result;
  result.epoch = epoch_;
  result.max_epochs = options_.max_epochs;
  result.step = loop_.step();
  result.lr = loop_.lr();
  const double trained = seconds();
  result.train = reduced(epoch_sums_);
  const int64_t samples = result.train.samples - restored_samples_;
  result.samples_per_s = static_cast<double>(samples) / std::max(trained - epoch_start_, 1e-9);
  if (task_.validation && !validate()) return false;
  result.test = validation_;
  result.seconds = seconds();
  result.test_samples_per_s =
      static_cast<double>(validation_.samples) / std::max(result.seconds - trained, 1e-9);
  epoch_sums_ = {};
  restored_samples_ = 0;
  ++epoch_;
  batches_ = 0;
  for (const auto& callback : callbacks_) callback->on_epoch_end(trainer_, result);
  return true;
}

Metrics FitLoop::evaluate(detail::BatchFeed& feed) {
  return lockstep::evaluate(*task_.module, loop_.parts(), feed, group_, options_.limit_val_batches);
}

/// False when a signal ended it.
bool FitLoop::validate() {
  const Metrics metrics = lockstep::evaluate(
      *task_.module, loop_.parts(), *task_.validation, group_, options_.limit_val_batches,
      [&] { return goes_on(agreement_->after_step(signals_->received())); });
  if (stop_requested_ != 0) return false;
  validation_ = metrics;
  return true;
}

bool FitLoop::wants_to_stop() const {
  return std::any_of(callbacks_.begin(), callbacks_.end(),
                     [](const auto& callback) { return callback->wants_to_stop(); });
}

void FitLoop::interrupt() {
  for (const auto& callback : callbacks_) callback->on_interrupt(trainer_, stop_requested_);
  throw InterruptedError(stop_requested_);
}

Metrics FitLoop::reduced(const MetricSums& mine) const {
  return metrics_of(reduce_over_ranks(group_, device(), mine));
}

double FitLoop::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

/// Where ranks do not see the folder, rank 0 has all.
CheckpointShards FitLoop::shards_to_save(bool seen_by_all) {
  const detail::TrainedParts& parts = loop_.parts();
  CheckpointShards shards;
  std::vector<TensorShard> optimizer;
  StateDict random = random_state(device());
  if (seen_by_all) {
    shards.model = detail::model_shards(*task_.module, parts);
    optimizer = detail::optimizer_shards(parts);
    const std::string prefix = "rank" + std::to_string(group_.rank()) + ".";
    shards.state = whole_shards(random, prefix);
  } else {
    shards.model = whole_shards(model_state());
    optimizer = whole_shards(detail::optimizer_state(parts));
    shards.state = whole_shards(gather_rank_state(group_, random));
  }
  for (TensorShard& shard : optimizer) {
    shard.name = kOptimizer + shard.name;
    shards.state.push_back(std::move(shard));
  }
  if (group_.rank() != 0) return shards;
  for (TensorShard& shard : whole_shards(detail::precision_state(parts), kPrecision))
    shards.state.push_back(std::move(shard));
  return shards;
}

FitLoop::SavedFolder& FitLoop::saved(const CheckpointFolder& folder) {
  const auto found = saved_folders_.find(folder.path());
  if (found != saved_folders_.end()) return found->second;
  SavedFolder made{is_seen_by_all(group_, folder.path()),
                   std::make_unique<CheckpointWriter>(group_, folder)};
  return saved_folders_.emplace(folder.path(), std::move(made)).first->second;
}

void FitLoop::save(CheckpointFolder& folder, CheckpointOverlap overlap) {
  const double begin = seconds();
  collect_sums();
  SavedFolder& target = saved(folder);
  // The epoch's sums of all ranks become rank 0's after a resume.
  const MetricSums sums = reduce_over_ranks(group_, device(), epoch_sums_);
  CheckpointShards shards = shards_to_save(target.seen_by_all);
  CheckpointInfo& info = shards.info;
  info.step = loop_.step();
  info.epoch = epoch_;
  info.batches = batches_;
  const int64_t samples = task_.train->samples_per_batch();
  info.samples = samples > 0 ? batches_ * samples : -1;
  info.identity = options_.identity;
  info.settings = options_.settings;
  info.values = sums.values(kEpoch);
  info.values.merge(loop_.values());
  info.values[detail::kSharesOfEpoch] = loop_.parts().front()->strategy().data_share().size;
  for (const auto& callback : callbacks_) info.values.merge(callback->values());
  target.writer->save(shards, overlap);
  save_seconds_ += seconds() - begin;
}

void FitLoop::finish_saves() {
  for (auto& [path, folder] : saved_folders_) folder.writer->finish();
}

/// Where the epoch goes on. A step must begin where one of the checkpoint's ended.
int64_t FitLoop::first_batch_of(const CheckpointInfo& info) const {
  if (info.batches == 0) return 0;
  const int64_t of_batch = task_.train->samples_per_batch();
  if (info.samples >= 0 && of_batch > 0) {
    const int64_t end = loop_.batches_per_epoch();
    if (info.samples >= end * of_batch) return end;
    if (info.samples == info.batches * of_batch) return info.batches;
    const int64_t of_step = of_batch * options_.accumulate_grad_batches;
    if (info.samples % of_step == 0) return info.samples / of_batch;
    throw CheckpointError("the checkpoint lies within an epoch, after " +
                              std::to_string(info.samples) +
                              " samples, where no step of this run begins: they have " +
                              std::to_string(of_step) + " samples over all ranks",
                          "keep the samples of a step (--global-batch-size), or resume from a "
                          "checkpoint at the end of an epoch");
  }
  const auto found = info.values.find(detail::kSharesOfEpoch);
  const int shares = loop_.parts().front()->strategy().data_share().size;
  if (found == info.values.end() || found->second == shares) return info.batches;
  throw CheckpointError("the checkpoint lies within an epoch of a run that cut the data into " +
                            std::to_string(std::llround(found->second)) +
                            " shares; this run cuts it into " + std::to_string(shares),
                        "resume with as many ranks and the strategy that it was saved with, or "
                        "from a checkpoint at the end of an epoch");
}

void FitLoop::restore(const StoredCheckpoint& checkpoint) {
  const CheckpointInfo& info = checkpoint.info;
  batches_ = first_batch_of(info);
  loop_.warm_up();
  const detail::TrainedParts& parts = loop_.parts();
  const detail::NeededState needed(parts);
  detail::load_model_state(
      *task_.module, parts,
      read_tensors(checkpoint, checkpoint.model, "",
                   [&](const std::string& name) { return needed.of_model(name); }));
  detail::load_optimizer_state(
      parts, read_tensors(checkpoint, checkpoint.state, kOptimizer,
                          [&](const std::string& name) { return needed.of_optimizer(name); }));
  detail::load_precision_state(parts, read_tensors(checkpoint, checkpoint.state, kPrecision));
  random_state_ = state_of_rank(checkpoint, group_.rank());
  loop_.load_values(info.step, info.values);
  epoch_ = info.epoch;
  const MetricSums sums = MetricSums::from_values(info.values, kEpoch);
  restored_samples_ = sums.samples;
  epoch_sums_ = group_.rank() == 0 ? sums : MetricSums();
  for (const auto& callback : callbacks_) callback->load_values(info.values);
}

}  // namespace lockstep
