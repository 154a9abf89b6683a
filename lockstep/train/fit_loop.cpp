#include "lockstep/train/fit_loop.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/words.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/kept_state.h"
#include "lockstep/train/random_state.h"
#include "lockstep/train/same_settings.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Names in a checkpoint.
constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kPrecision = "precision.";

/// Of this process, in the host's memory.
double resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  double total = 0;
  double resident = 0;
  statm >> total >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

template <class T>
std::string exact_text(const T& value) {
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<double>::max_digits10) << value;
  return text.str();
}

/// 0: batches are not cut into logical shards.
int64_t logical_shards_of(const TrainerOptions& options) {
  return options.strategy_options.logical_shards.value_or(LogicalShardsOptions()).count;
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
  set("logical_shards", logical_shards_of(options));
  set("shard_seed", options.strategy_options.logical_shards.value_or(LogicalShardsOptions()).seed);
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
  if (!task.module->automatic_optimization() && options.strategy_options.logical_shards) {
    throw UsageError("a module that calls update itself was given with logical shards",
                     "let it return its loss (automatic_optimization), or leave the shards out");
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

/// Whether each rank has all of the state after a step, which all have applied or none.
bool is_whole_after_step(const TrainerOptions& options, const StepLoop& loop) {
  const DdpOptions ddp = options.strategy_options.ddp.value_or(DdpOptions());
  return has_whole_state(options.strategy, options.strategy_options) && !ddp.custom_hook &&
         !ddp.async_custom_hook && loop.automatic() &&
         !loop.parts().front()->strategy().needs_closure();
}

}  // namespace

void detail::check_share(const BatchFeed& feed, const DataShare& share, const std::string& use) {
  if (static_cast<int>(feed.shards()) != share.count) {
    throw UsageError("a Trainer was given " + counted(feed.shards(), "loader") + "; " + use + " " +
                         counted(share.count, "share"),
                     "give one loader, or with StrategyOptions::logical_shards a vector of one for "
                     "each of data_share(strategy, options, rank, size).count shares");
  }
  const SamplerOptions* const sampler = feed.sampler();
  if (!sampler || (sampler->rank == share.rank && sampler->world_size == share.size)) return;
  throw UsageError("a loader's sampler has rank " + std::to_string(sampler->rank) + " of " +
                       std::to_string(sampler->world_size) + "; " + use + " share " +
                       std::to_string(share.rank) + " of " + std::to_string(share.size),
                   "make the sampler from lockstep::data_share(strategy, options, rank, size)");
}

FitLoop::FitLoop(Trainer& trainer, detail::TrainTask task,
                 const std::vector<std::shared_ptr<Callback>>& callbacks, ElasticJob* job)
    : trainer_(trainer),
      options_(trainer.options()),
      group_(trainer.world().group()),
      task_(ready(std::move(task), trainer)),
      loop_(task_, group_, options_),
      callbacks_(callbacks),
      job_(job),
      keeps_steps_(job && is_whole_after_step(options_, loop_)),
      start_(Clock::now()) {
  check_same_settings(settings_of_parts(loop_.parts()), group_);
  int has_loggers = trainer.is_first_rank() && !options_.loggers.empty() ? 1 : 0;
  group_.all_reduce_values(has_loggers);
  compares_times_ = has_loggers != 0;
  const std::string slow = loop_.parts().front()->precision().slow_because();
  if (trainer.is_first_rank() && !slow.empty()) log_warning(slow);
}

FitResult FitLoop::run() {
  try {
    FitResult result = run_to_end();
    leave_kept_state();
    return result;
  } catch (const GenerationEnded&) {
    leave_kept_state();
    throw;
  } catch (const CommError&) {
    leave_kept_state();
    if (job_) job_->leave();  // What writes checkpoints behind training waits for all ranks.
    throw;
  }
}

FitResult FitLoop::run_to_end() {
  const StopSignal signals;
  signals_ = &signals;
  agreement_.emplace(group_, device());
  start_ = Clock::now();
  start_interval();
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
  // A rank died before this step's own row was written, and callbacks were told of the step.
  const bool is_to_be_logged = loop_.step() % options_.log_every_n_steps == 0;
  if (loop_.step() > logged_step_ && is_to_be_logged) {
    log_step(last_step_);
    for (const auto& callback : callbacks_) callback->on_step(trainer_, last_step_);
  }
  // A stage of a pipeline has work of its own, and a rank may have one logical shard more.
  const bool alike = loop_.parts().front()->strategy().data_share().size == group_.size() &&
                     logical_shards_of(options_) % group_.size() == 0;
  while (epoch_ < options_.max_epochs && !wants_to_stop()) {
    start_interval();
    epoch_start_ = log_start_;
    const bool whole = loop_.run_epoch(epoch_, batches_, [&](const StepResult& result) {
      after_step(result);
      const double own = alike ? result.own_seconds : 0;
      const bool on = goes_on(agreement_->after_step(signals_->received(), own));
      if (on && job_) job_->commit();
      return on;
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
  if (keeps_steps_) keep_step();
  // Logged first: a checkpoint of this step must not be on the disk before the step's own row is.
  if (result.step % options_.log_every_n_steps == 0) log_step(result);
  for (const auto& callback : callbacks_) callback->on_step(trainer_, result);
}

void FitLoop::collect_sums() {
  const ShardSums sums = loop_.take_sums();
  add_sums(log_sums_, sums);
  add_sums(epoch_sums_, sums);
}

void FitLoop::log_step(const StepResult& result) {
  collect_sums();
  LogResult log;
  log.step = result;
  log.metrics = metrics_of(reduced(std::exchange(log_sums_, {})));
  logged_step_ = result.step;
  log.save_seconds = std::exchange(save_seconds_, 0);
  const double now = seconds();
  log.samples_per_s = static_cast<double>(log.metrics.samples) / std::max(now - log_start_, 1e-9);
  if (compares_times_) log.ranks = times_of_ranks();
  start_interval();
  for (const auto& callback : callbacks_) callback->on_log(trainer_, log);
  if (!kept_) return;
  for (const auto& [name, value] : MetricSums().values(detail::kLogSums))
    kept_->info.values[name] = value;
  kept_->info.values[detail::kLoggedStep] = static_cast<double>(logged_step_);
}

void FitLoop::start_interval() {
  log_start_ = seconds();
  log_start_held_up_ = time_held_up();
  loop_.take_times();
}

/// A collective.
std::vector<RankTimes> FitLoop::times_of_ranks() {
  constexpr size_t kMembers = sizeof(RankTimes) / sizeof(double);
  RankTimes mine = loop_.take_times();
  mine.waiting = std::chrono::duration<double>(time_held_up() - log_start_held_up_).count();
  mine.other = std::max(
      0.0, seconds() - log_start_ - mine.data - mine.compute - mine.optimizer - mine.waiting);
  mine.memory = resident_bytes();
  std::vector<RankTimes> all(static_cast<size_t>(group_.size()));
  all[static_cast<size_t>(group_.rank())] = mine;
  at::Tensor wire =
      at::from_blob(all.data(), {static_cast<int64_t>(all.size() * kMembers)}, at::kDouble)
          .to(device());
  group_.all_reduce(wire);
  const at::Tensor result = wire.cpu();
  const auto* const first = reinterpret_cast<const RankTimes*>(result.const_data_ptr<double>());
  return {first, first + all.size()};
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
  result.train = metrics_of(reduced(epoch_sums_));
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
  loop_.skip(0);
  for (const auto& callback : callbacks_) callback->on_epoch_end(trainer_, result);
  return true;
}

Metrics FitLoop::evaluate(detail::BatchFeed& feed, const std::function<bool()>& go_on) {
  return lockstep::evaluate(*task_.module, loop_.parts(), feed, group_, options_.limit_val_batches,
                            go_on, logical_shards_of(options_));
}

/// False when a signal ended it.
bool FitLoop::validate() {
  const Metrics metrics = evaluate(
      *task_.validation, [&] { return goes_on(agreement_->after_step(signals_->received())); });
  if (stop_requested_ != 0) return false;
  validation_ = metrics;
  return true;
}

bool FitLoop::wants_to_stop() const {
  return std::any_of(callbacks_.begin(), callbacks_.end(),
                     [](const auto& callback) { return callback->wants_to_stop(); });
}

/// Whether only ranks of other hosts got the signal. Those of a host get it at once.
bool FitLoop::is_signal_of_other_hosts() const {
  if (!job_ || !job_->spans_hosts()) return false;
  const auto end = Clock::now() + std::chrono::seconds(1);
  for (PollPause pause; signals_->received() == 0; pause.sleep())
    if (Clock::now() > end) return true;
  return false;
}

void FitLoop::interrupt() {
  for (const auto& callback : callbacks_) callback->on_interrupt(trainer_, stop_requested_);
  if (is_signal_of_other_hosts())
    throw GenerationEnded("ranks of another host were told to stop",
                          "let this exception pass: ElasticJob::run catches it");
  throw InterruptedError(stop_requested_);
}

MetricSums FitLoop::reduced(const ShardSums& mine) const {
  return reduce_over_shards(group_, device(), mine, logical_shards_of(options_));
}

double FitLoop::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

/// Of one rank. `precision` is alike on all of them.
CheckpointShards FitLoop::shards_of(std::vector<TensorShard> model,
                                    const std::vector<TensorShard>& optimizer,
                                    std::vector<TensorShard> random, bool with_precision) {
  CheckpointShards shards{{}, std::move(model), std::move(random)};
  for (TensorShard shard : optimizer) {
    shard.name = kOptimizer + shard.name;
    shards.state.push_back(std::move(shard));
  }
  if (!with_precision) return shards;
  for (auto& shard : whole_shards(detail::precision_state(loop_.parts()), kPrecision))
    shards.state.push_back(std::move(shard));
  return shards;
}

/// Where ranks do not see the folder, rank 0 has all.
CheckpointShards FitLoop::shards_to_save(bool seen_by_all) {
  const detail::TrainedParts& parts = loop_.parts();
  const StateDict random = random_state(device());
  const bool is_first = group_.rank() == 0;
  if (!seen_by_all)
    return shards_of(whole_shards(model_state()), whole_shards(detail::optimizer_state(parts)),
                     whole_shards(gather_rank_state(group_, random)), is_first);
  return shards_of(detail::model_shards(*task_.module, parts), detail::optimizer_shards(parts),
                   whole_shards(random, "rank" + std::to_string(group_.rank()) + "."), is_first);
}

/// Where training stands, but for tensors.
CheckpointInfo FitLoop::position(const MetricSums& epoch_sums) const {
  CheckpointInfo info;
  info.step = loop_.step();
  info.epoch = epoch_;
  info.batches = batches_;
  info.samples = loop_.samples_after(batches_);
  info.values = epoch_sums.values(detail::kEpochSums);
  info.values.merge(loop_.values());
  info.values[detail::kSharesOfEpoch] = loop_.parts().front()->strategy().data_share().size;
  const int64_t skipped = loop_.samples_after(0);
  if (skipped > 0) info.values[detail::kSkippedOfEpoch] = static_cast<double>(skipped);
  for (const auto& callback : callbacks_) info.values.merge(callback->values());
  return info;
}

void FitLoop::keep_step() {
  collect_sums();
  // Without logical shards there is one of each: see Trainer::live_on.
  KeptStep kept{position(epoch_sums_.front()), random_state(device()), {}};
  kept.info.values.merge(log_sums_.front().values(detail::kLogSums));
  kept.info.values[detail::kLoggedStep] = static_cast<double>(logged_step_);
  for (const at::Tensor& buffer : task_.module->buffers()) kept.buffers.push_back(buffer.clone());
  kept_ = std::move(kept);
}

/// Of the last step that was finished, to the job. Tensors are those of the module and the
/// optimizer.
void FitLoop::leave_kept_state() {
  if (!kept_) return;
  const at::NoGradGuard no_grad;
  auto buffers = task_.module->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(kept_->buffers[i]);
  const detail::TrainedParts& parts = loop_.parts();
  StoredCheckpoint state{shards_of(whole_shards(detail::own_model_state(*task_.module, parts)),
                                   detail::optimizer_shards(parts),
                                   whole_shards(kept_->random, "rank0."), true)};
  state.info = kept_->info;
  job_->kept() = std::make_shared<const StoredCheckpoint>(std::move(state));
}

FitLoop::SavedFolder& FitLoop::saved(const CheckpointFolder& folder) {
  const auto found = saved_folders_.find(folder.path());
  if (found != saved_folders_.end()) return found->second;
  SavedFolder made;
  made.seen_by_all = is_seen_by_all(group_, folder.path());
  made.writer = std::make_unique<CheckpointWriter>(group_, folder);
  return saved_folders_.emplace(folder.path(), std::move(made)).first->second;
}

void FitLoop::save(CheckpointFolder& folder, CheckpointOverlap overlap, bool may_be_lost) {
  const double begin = seconds();
  collect_sums();
  SavedFolder& target = saved(folder);
  for (const auto& part : loop_.parts()) {
    // Snapshots may be frequent.
    if (!may_be_lost) part->strategy().check_equal();
  }
  target.may_be_lost = may_be_lost;
  // The epoch's sums of all ranks become rank 0's after a resume.
  const MetricSums sums = reduced(epoch_sums_);
  CheckpointShards shards = shards_to_save(target.seen_by_all);
  shards.info = position(sums);
  shards.info.identity = options_.identity;
  shards.info.settings = options_.settings;
  target.writer->save(shards, overlap);
  save_seconds_ += seconds() - begin;
}

void FitLoop::finish_saves() {
  for (auto& [path, folder] : saved_folders_) {
    try {
      folder.writer->finish();
    } catch (const CheckpointError&) {
      if (!folder.may_be_lost) throw;
    }
  }
}

/// Where the epoch goes on. A step must begin where one of the checkpoint's ended. From a state
/// `in_memory` the samples are skipped that are done.
int64_t FitLoop::first_batch_of(const CheckpointInfo& info, bool in_memory) {
  const int64_t of_batch = task_.train->samples_per_batch();
  if (info.samples > 0 && of_batch > 0) {
    const auto skipped = info.values.find(detail::kSkippedOfEpoch);
    const int64_t before = skipped == info.values.end() ? 0 : std::llround(skipped->second);
    loop_.skip(before);
    const int64_t done = info.samples - before;
    const int64_t end = loop_.batches_per_epoch();
    const SamplerOptions* const sampler = task_.train->sampler();
    if (done >= end * of_batch || (sampler && info.samples >= sampler->dataset_size)) return end;
    if (done == info.batches * of_batch) return info.batches;
    const int64_t of_step = of_batch * options_.accumulate_grad_batches;
    if (done % of_step == 0) return done / of_batch;
    if (in_memory && loop_.skip(info.samples)) return 0;
    throw CheckpointError("the checkpoint lies within an epoch, after " +
                              std::to_string(info.samples) +
                              " samples, where no step of this run begins: they have " +
                              std::to_string(of_step) + " samples over all ranks",
                          "keep the samples of a step (--global-batch-size), or resume from a "
                          "checkpoint at the end of an epoch");
  }
  if (info.batches == 0) return 0;
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
  batches_ = first_batch_of(info, checkpoint.folder.empty());
  loop_.warm_up();
  const detail::TrainedParts& parts = loop_.parts();
  detail::load_model_state(
      *task_.module, parts,
      read_tensors(checkpoint, checkpoint.model, "", detail::needed_of_model(parts)));
  detail::load_optimizer_state(parts, read_tensors(checkpoint, checkpoint.state, kOptimizer,
                                                   detail::needed_of_optimizer(parts)));
  detail::load_precision_state(parts, read_tensors(checkpoint, checkpoint.state, kPrecision));
  random_state_ = state_of_rank(checkpoint, group_.rank());
  loop_.load_values(info.step, info.values);
  epoch_ = info.epoch;
  const MetricSums sums = MetricSums::from_values(info.values, detail::kEpochSums);
  restored_samples_ = sums.samples;
  epoch_sums_ = log_sums_ = ShardSums(task_.train->shards());
  if (group_.rank() == 0) epoch_sums_.front() = sums;
  log_sums_.front() = MetricSums::from_values(info.values, detail::kLogSums);
  const auto logged = info.values.find(detail::kLoggedStep);
  logged_step_ = logged == info.values.end() ? info.step : std::llround(logged->second);
  last_step_.step = info.step;
  last_step_.total_steps = loop_.total_steps(epoch_, batches_);
  last_step_.epoch = epoch_;
  last_step_.batches = batches_;
  last_step_.lr = loop_.lr();
  for (const auto& callback : callbacks_) callback->load_values(info.values);
}

}  // namespace lockstep
