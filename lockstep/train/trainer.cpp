#include "lockstep/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/save_checkpoint.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/random_state.h"
#include "lockstep/train/same_settings.h"
#include "lockstep/train/step_loop.h"
#include "lockstep/train/stop_agreement.h"
#include "lockstep/train/stop_signal.h"
#include "lockstep/train/weights.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

// Names in a checkpoint.
constexpr const char* kEpoch = "epoch.";
constexpr const char* kShares = "epoch.shares";
constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kPrecision = "precision.";

template <class T>
std::string exact_text(const T& value) {
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<double>::max_digits10) << value;
  return text.str();
}

void check_ranges(const TrainerOptions& options) {
  const auto at_least = [](const char* name, int64_t value, int64_t minimum) {
    if (value >= minimum) return;
    throw UsageError(std::string(name) + " is " + std::to_string(value) + "; it must be at least " +
                     std::to_string(minimum));
  };
  at_least("max_epochs", options.max_epochs, 0);
  at_least("accumulate_grad_batches", options.accumulate_grad_batches, 1);
  at_least("limit_train_batches", options.limit_train_batches, 0);
  at_least("limit_test_batches", options.limit_test_batches, 0);
  at_least("log_every_n_steps", options.log_every_n_steps, 1);
  if (!(options.gradient_clip_val >= 0)) throw UsageError("gradient_clip_val must not be negative");
}

/// What every rank must have alike to make the same collective calls, or to learn the same.
Settings settings_of_all_ranks(const TrainerOptions& options, const TrainTask& task) {
  Settings settings{{"strategy", options.strategy},
                    {"precision", options.precision.precision},
                    {"amp_level", options.precision.amp_level},
                    {"loss_scale", options.precision.loss_scale}};
  const auto set = [&](const std::string& name, auto value) { settings[name] = exact_text(value); };
  set("max_epochs", options.max_epochs);
  set("accumulate_grad_batches", options.accumulate_grad_batches);
  set("gradient_clip_val", options.gradient_clip_val);
  set("limit_train_batches", options.limit_train_batches);
  set("limit_test_batches", options.limit_test_batches);
  set("log_every_n_steps", options.log_every_n_steps);
  constexpr const char* kPolicies[] = {"stop", "skip", "proceed"};
  set("on_nan", kPolicies[static_cast<int>(options.on_nan)]);
  set("batches of an epoch", task.train->batches_per_epoch());
  set("batches of an evaluation", task.test ? task.test->batches_per_epoch() : 0);
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

/// Each rank must see what its strategy wants it to see, or samples are trained on twice.
void check_share(const SamplerOptions* sampler, const DataShare& share,
                 const std::string& strategy) {
  if (!sampler || (sampler->rank == share.rank && sampler->world_size == share.size)) return;
  throw UsageError("a loader's sampler has rank " + std::to_string(sampler->rank) + " of " +
                       std::to_string(sampler->world_size) + "; with strategy " + strategy +
                       " this rank trains on share " + std::to_string(share.rank) + " of " +
                       std::to_string(share.size),
                   "make the sampler from lockstep::data_share(strategy, options, rank, size)");
}

void check_module(const TrainTask& task, const TrainerOptions& options) {
  if (!task.module || !task.train) {
    throw UsageError("the training task has no module or no loader",
                     "make it by lockstep::training_task");
  }
  if (!task.module->automatic_optimization() && options.accumulate_grad_batches > 1) {
    throw UsageError("accumulate_grad_batches is " +
                         std::to_string(options.accumulate_grad_batches) +
                         ", but the module calls update itself",
                     "call accumulate in its training_step for the batches before an update");
  }
}

/// Before the first collective call that depends on them.
TrainTask ready(TrainTask task, const TrainerOptions& options, const World& world) {
  check_ranges(options);
  check_module(task, options);
  check_same_settings(settings_of_all_ranks(options, task), world.group());
  const DataShare share =
      data_share(options.strategy, options.strategy_options, world.rank(), world.size());
  check_share(task.train->sampler(), share, options.strategy);
  if (task.test) check_share(task.test->sampler(), share, options.strategy);
  task.device = world.device();
  task.module->to(task.device);
  return task;
}

}  // namespace

class Trainer::Impl {
 public:
  Impl(Trainer& trainer, const World& world, TrainTask task, TrainerOptions options)
      : trainer_(trainer),
        world_(world),
        task_(ready(std::move(task), options, world)),
        options_(std::move(options)),
        loop_(task_, world.group(), options_),
        start_(Clock::now()) {
    check_same_settings(settings_of_parts(loop_.parts()), world.group());
    const std::string slow = loop_.parts().front()->precision().slow_because();
    if (world.rank() == 0 && !slow.empty()) log_warning(slow);
    options_.identity["number of ranks"] = std::to_string(world.size());
  }

  FitResult fit();
  void restore(const Checkpoint& checkpoint);
  void save(CheckpointFolder& folder);
  void add_callback(std::shared_ptr<Callback> callback) {
    callbacks_.push_back(std::move(callback));
  }
  NamedTensors model_state() { return detail::model_state(*task_.module, loop_.parts()); }
  TrainingModuleBase& module() { return *task_.module; }
  const Strategy& strategy(const std::string& optimizer) const {
    return loop_.part_named(optimizer).strategy();
  }
  const World& world() const { return world_; }
  const TrainerOptions& options() const { return options_; }
  int64_t total_steps() const { return loop_.total_steps(); }

 private:
  void after_step(const StepResult& result);
  void log_step(const StepResult& result);
  void collect_sums();
  bool finish_epoch();
  bool test();
  bool goes_on(int agreed);
  bool goes_on_now();
  bool wants_to_stop() const;
  [[noreturn]] void interrupt(int signal_number);
  Metrics reduced(const MetricSums& mine) const;
  void check_position(const CheckpointInfo& info) const;
  double seconds() const;

  Trainer& trainer_;
  const World& world_;
  TrainTask task_;
  TrainerOptions options_;
  StepLoop loop_;
  const StopSignal* signals_ = nullptr;  ///< While `fit` runs.
  std::optional<StopAgreement> agreement_;
  std::vector<std::shared_ptr<Callback>> callbacks_;
  int64_t epoch_ = 0;
  int64_t batches_ = 0;           ///< Of the epoch that are behind us.
  MetricSums log_sums_;           ///< This rank's, since the last log.
  int64_t logged_step_ = 0;       ///< Of the last log. Ranks may have sums or none, but all steps.
  MetricSums epoch_sums_;         ///< This rank's, of the epoch.
  int64_t restored_samples_ = 0;  ///< Of the epoch, made before the checkpoint.
  double log_start_ = 0;
  double epoch_start_ = 0;
  int stop_requested_ = 0;
  StepResult last_step_;
  Metrics test_;
  NamedTensors random_state_;  ///< To be set when `fit` begins.
  Clock::time_point start_;
};

FitResult Trainer::Impl::fit() {
  const StopSignal signals;
  signals_ = &signals;
  agreement_.emplace(world_.group(), task_.device);
  start_ = Clock::now();
  logged_step_ = loop_.step();
  if (!random_state_.empty()) set_random_state(random_state_, task_.device);
  for (const auto& callback : callbacks_) callback->on_start(trainer_);
  try {
    while (epoch_ < options_.max_epochs && !wants_to_stop()) {
      epoch_start_ = log_start_ = seconds();
      const bool whole = loop_.run_epoch(epoch_, batches_, [&](const StepResult& result) {
        after_step(result);
        return goes_on(agreement_->after_step(signals.received()));
      });
      if (whole && goes_on_now() && finish_epoch()) goes_on_now();
      if (stop_requested_ != 0) interrupt(stop_requested_);
    }
    if (task_.test && test_.samples == 0 && !test()) interrupt(stop_requested_);
  } catch (const CommError&) {
    // The other ranks got the signal too, and one of them is gone already.
    if (signals.received() != 0) throw InterruptedError(signals.received());
    throw;
  }
  FitResult result;
  result.steps = loop_.step();
  result.epochs = epoch_;
  result.test = test_;
  result.stopped_early = epoch_ < options_.max_epochs;
  result.seconds = seconds();
  for (const auto& callback : callbacks_) callback->on_end(trainer_, result);
  if (signals.received() != 0) throw InterruptedError(signals.received());
  return result;
}

/// Notes what the ranks have agreed on; 0 is to go on.
bool Trainer::Impl::goes_on(int agreed) {
  stop_requested_ = agreed;
  return agreed == 0;
}

bool Trainer::Impl::goes_on_now() {
  return goes_on(agreement_->now(signals_->received()));
}

void Trainer::Impl::after_step(const StepResult& result) {
  batches_ = result.batches;
  last_step_ = result;
  // Logged first: a checkpoint of this step must not be on the disk before the step's own row is.
  if (result.step % options_.log_every_n_steps == 0) log_step(result);
  for (const auto& callback : callbacks_) callback->on_step(trainer_, result);
}

void Trainer::Impl::collect_sums() {
  const MetricSums sums = loop_.take_sums();
  log_sums_.add(sums);
  epoch_sums_.add(sums);
}

void Trainer::Impl::log_step(const StepResult& result) {
  collect_sums();
  logged_step_ = result.step;
  LogResult log;
  log.step = result;
  log.metrics = reduced(std::exchange(log_sums_, {}));
  const double now = seconds();
  log.samples_per_s = static_cast<double>(log.metrics.samples) / std::max(now - log_start_, 1e-9);
  log_start_ = now;
  for (const auto& callback : callbacks_) callback->on_log(trainer_, log);
}

/// False when a signal ended the evaluation: the epoch is to be finished after a resume.
bool Trainer::Impl::finish_epoch() {
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
  if (task_.test && !test()) return false;
  result.test = test_;
  result.seconds = seconds();
  result.test_samples_per_s =
      static_cast<double>(test_.samples) / std::max(result.seconds - trained, 1e-9);
  epoch_sums_ = {};
  restored_samples_ = 0;
  ++epoch_;
  batches_ = 0;
  for (const auto& callback : callbacks_) callback->on_epoch_end(trainer_, result);
  return true;
}

/// False when a signal ended it.
bool Trainer::Impl::test() {
  const Metrics metrics = evaluate(*task_.module, loop_.parts(), *task_.test, world_.group(),
                                   task_.device, options_.limit_test_batches, [&] {
                                     return goes_on(agreement_->after_step(signals_->received()));
                                   });
  if (stop_requested_ != 0) return false;
  test_ = metrics;
  return true;
}

bool Trainer::Impl::wants_to_stop() const {
  return std::any_of(callbacks_.begin(), callbacks_.end(),
                     [](const auto& callback) { return callback->wants_to_stop(); });
}

void Trainer::Impl::interrupt(int signal_number) {
  for (const auto& callback : callbacks_) callback->on_interrupt(trainer_, signal_number);
  throw InterruptedError(signal_number);
}

Metrics Trainer::Impl::reduced(const MetricSums& mine) const {
  return metrics_of(reduce_over_ranks(world_.group(), task_.device, mine));
}

double Trainer::Impl::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void Trainer::Impl::save(CheckpointFolder& folder) {
  collect_sums();
  // The epoch's sums of all ranks become rank 0's after a resume.
  const MetricSums sums = reduce_over_ranks(world_.group(), task_.device, epoch_sums_);
  Checkpoint checkpoint;
  checkpoint.info.step = loop_.step();
  checkpoint.info.epoch = epoch_;
  checkpoint.info.batches = batches_;
  checkpoint.info.identity = options_.identity;
  checkpoint.info.settings = options_.settings;
  checkpoint.info.values = sums.values(kEpoch);
  checkpoint.info.values.merge(loop_.values());
  checkpoint.info.values[kShares] = loop_.parts().front()->strategy().data_share().size;
  for (const auto& callback : callbacks_) checkpoint.info.values.merge(callback->values());
  checkpoint.model = model_state();
  for (const auto& [name, tensor] : detail::optimizer_state(loop_.parts())) {
    checkpoint.state.emplace_back(kOptimizer + name, tensor);
  }
  for (const auto& [name, tensor] : detail::precision_state(loop_.parts())) {
    checkpoint.state.emplace_back(kPrecision + name, tensor);
  }
  save_checkpoint(world_.group(), folder, checkpoint, random_state(task_.device));
}

/// A position within an epoch is one of batches, whose number depends on how the data is shared.
void Trainer::Impl::check_position(const CheckpointInfo& info) const {
  const auto found = info.values.find(kShares);
  if (info.batches == 0 || found == info.values.end()) return;
  const int shares = loop_.parts().front()->strategy().data_share().size;
  if (found->second == shares) return;
  throw CheckpointError("the checkpoint lies within an epoch of a run that cut the data into " +
                            exact_text(found->second) + " shares; strategy " + options_.strategy +
                            " cuts it into " + std::to_string(shares),
                        "resume with the strategy that it was saved with, or from a checkpoint at "
                        "the end of an epoch");
}

void Trainer::Impl::restore(const Checkpoint& checkpoint) {
  check_position(checkpoint.info);
  loop_.warm_up();
  detail::load_model_state(*task_.module, loop_.parts(), checkpoint.model);
  detail::load_optimizer_state(loop_.parts(), with_prefix_removed(checkpoint.state, kOptimizer));
  detail::load_precision_state(loop_.parts(), with_prefix_removed(checkpoint.state, kPrecision));
  random_state_ = state_of_rank(checkpoint, world_.rank());
  const CheckpointInfo& info = checkpoint.info;
  const std::string changed = changed_settings(info.settings, options_.settings);
  if (world_.rank() == 0 && !changed.empty()) {
    log_warning("this run goes on with other settings: " + changed +
                "; its course is not that of a run without an interruption");
  }
  loop_.load_values(info.step, info.values);
  epoch_ = info.epoch;
  batches_ = info.batches;
  const MetricSums sums = MetricSums::from_values(info.values, kEpoch);
  restored_samples_ = sums.samples;
  epoch_sums_ = world_.rank() == 0 ? sums : MetricSums();
  for (const auto& callback : callbacks_) callback->load_values(info.values);
}

Trainer::Trainer(const World& world, TrainTask task, TrainerOptions options)
    : impl_(std::make_unique<Impl>(*this, world, std::move(task), std::move(options))) {}
Trainer::~Trainer() = default;

void Trainer::add_callback(std::shared_ptr<Callback> callback) {
  impl_->add_callback(std::move(callback));
}
FitResult Trainer::fit() {
  return impl_->fit();
}
void Trainer::restore(const Checkpoint& checkpoint) {
  impl_->restore(checkpoint);
}
void Trainer::save(CheckpointFolder& folder) {
  impl_->save(folder);
}
NamedTensors Trainer::model_state() {
  return impl_->model_state();
}
void Trainer::save_weights(const std::filesystem::path& path,
                           const std::map<std::string, std::string>& metadata) {
  const NamedTensors tensors = model_state();
  if (is_first_rank()) lockstep::save_weights(tensors, path, metadata);
}
TrainingModuleBase& Trainer::module() {
  return impl_->module();
}
const Strategy& Trainer::strategy(const std::string& optimizer) const {
  return impl_->strategy(optimizer);
}
const World& Trainer::world() const {
  return impl_->world();
}
const TrainerOptions& Trainer::options() const {
  return impl_->options();
}
int64_t Trainer::total_steps() const {
  return impl_->total_steps();
}
bool Trainer::is_first_rank() const {
  return world().rank() == 0;
}

}  // namespace lockstep
