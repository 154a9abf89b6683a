#include "lockstep/train/trainer.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/parallel/logical_shards.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/fit_loop.h"
#include "lockstep/train/kept_state.h"
#include "lockstep/train/log_to_loggers.h"
#include "lockstep/train/same_settings.h"
#include "lockstep/train/weights.h"

namespace lockstep {
namespace {

void check_ranges(const TrainerOptions& options) {
  const auto at_least = [](const char* name, int64_t value, int64_t minimum) {
    if (value >= minimum) return;
    throw UsageError(std::string(name) + " is " + std::to_string(value) + "; it must be at least " +
                     std::to_string(minimum));
  };
  at_least("max_epochs", options.max_epochs, 0);
  at_least("accumulate_grad_batches", options.accumulate_grad_batches, 1);
  at_least("limit_train_batches", options.limit_train_batches, 0);
  at_least("limit_val_batches", options.limit_val_batches, 0);
  at_least("log_every_n_steps", options.log_every_n_steps, 1);
  if (!(options.gradient_clip_val >= 0)) throw UsageError("gradient_clip_val must not be negative");
}

}  // namespace

class Trainer::Impl {
 public:
  Impl(const World& world, TrainerOptions options) : world_(world), options_(std::move(options)) {
    check_ranges(options_);
    if (world.rank() == 0 && !options_.loggers.empty()) {
      logged_ = std::make_shared<detail::LogToLoggers>(options_);
      callbacks_.push_back(logged_);
    }
    if (options_.strategy_options.logical_shards == 0) {
      options_.settings["number of ranks"] = std::to_string(world.size());
    } else {
      options_.settings["arithmetic"] = arithmetic_of_process();
      options_.settings["processor"] = processor_model();
    }
  }

  FitResult fit(Trainer& trainer, detail::TrainTask task) {
    fit_.reset();  // what it holds of the module goes first
    if (job_ && fitted_) throw UsageError("a Trainer that lives on in an ElasticJob fits once");
    fitted_ = true;
    fit_ = std::make_unique<FitLoop>(trainer, std::move(task), callbacks_, job_);
    if (checkpoint_) {
      fit_->restore(*checkpoint_);
      checkpoint_.reset();
    } else if (!optimizer_state_.empty()) {
      fit_->load_optimizer(optimizer_state_);
    }
    optimizer_state_.clear();
    if (!logged_) return run();
    const int64_t generation = job_ ? job_->generation() : 0;
    logged_->prepare(fit_->steps().parts(),
                     env_int("TORCHELASTIC_RESTART_COUNT").value_or(0) + generation);
    fit_->before_step([this](int64_t step) { logged_->before_step(step); });
    try {
      FitResult result = run();
      logged_->close({});
      return result;
    } catch (const std::exception& error) {
      logged_->close(error.what());
      throw;
    }
  }
  FitResult run() { return job_ ? run_in_job() : fit_->run(); }
  std::optional<CheckpointInfo> live_on(ElasticJob& job);
  Metrics validate(TrainingModuleBase& module, detail::BatchFeed& feed);
  void restore(StoredCheckpoint checkpoint);
  /// The latest fit. `what` is the function that needs one.
  FitLoop& fitted(const char* what) const {
    if (fit_) return *fit_;
    throw UsageError(std::string("Trainer::") + what + " was called before fit",
                     "call it in a callback or after fit");
  }

  FitResult run_in_job();

  const World& world_;
  ElasticJob* job_ = nullptr;
  bool fitted_ = false;
  TrainerOptions options_;
  std::shared_ptr<detail::LogToLoggers> logged_;  ///< On rank 0, where there are loggers.
  std::vector<std::shared_ptr<Callback>> callbacks_;
  std::optional<StoredCheckpoint> checkpoint_;  ///< From which the next fit goes on.
  StateDict optimizer_state_;                   ///< With which the next fit begins; empty: none.
  std::unique_ptr<FitLoop> fit_;
};

FitResult Trainer::Impl::run_in_job() {
  const auto keep = [&] {
    if (auto state = fit_->state_of_last_step()) job_->kept() = std::move(state);
  };
  try {
    FitResult result = fit_->run();
    keep();
    return result;
  } catch (const GenerationEnded&) {
    keep();
    throw;
  } catch (const CommError&) {
    keep();
    job_->leave();  // What writes checkpoints behind training waits for all ranks.
    throw;
  }
}

std::optional<CheckpointInfo> Trainer::Impl::live_on(ElasticJob& job) {
  job_ = &job;
  const auto kept = detail::share_kept_state(
      std::static_pointer_cast<const StoredCheckpoint>(job.kept()), world_);
  if (!kept) return std::nullopt;
  job.kept() = kept;
  checkpoint_ = *kept;
  return kept->info;
}

Metrics Trainer::Impl::validate(TrainingModuleBase& module, detail::BatchFeed& feed) {
  check_same_settings({{"batches of an evaluation", std::to_string(feed.batches_per_epoch())},
                       {"limit_val_batches", std::to_string(options_.limit_val_batches)}},
                      world_.group());
  feed.move_to(world_.device());
  if (fit_ && &fit_->module() == &module) {
    detail::check_share(feed, fit_->steps().parts().front()->strategy().data_share(),
                        "with strategy " + options_.strategy + " this rank evaluates");
    fit_->steps().cast_batches(feed);
    return fit_->evaluate(feed);
  }
  detail::check_share(feed, {world_.rank(), world_.size()}, "this rank evaluates");
  module.to(world_.device());
  return evaluate(module, {}, feed, world_.group(), options_.limit_val_batches);
}

void Trainer::Impl::restore(StoredCheckpoint checkpoint) {
  const std::string changed = changed_settings(checkpoint.info.settings, options_.settings);
  if (world_.rank() == 0 && !changed.empty()) {
    log_warning("this run goes on with other settings: " + changed +
                "; its course is not that of a run without an interruption");
  }
  checkpoint_ = std::move(checkpoint);
}

Trainer::Trainer(const World& world, TrainerOptions options)
    : impl_(std::make_unique<Impl>(world, std::move(options))) {}
Trainer::~Trainer() = default;

void Trainer::add_callback(std::shared_ptr<Callback> callback) {
  impl_->callbacks_.push_back(std::move(callback));
}
FitResult Trainer::fit(detail::TrainTask task) {
  return impl_->fit(*this, std::move(task));
}
Metrics Trainer::validate(TrainingModuleBase& module, detail::BatchFeed& feed) {
  return impl_->validate(module, feed);
}
void Trainer::restore(StoredCheckpoint checkpoint) {
  impl_->restore(std::move(checkpoint));
}
std::optional<CheckpointInfo> Trainer::live_on(ElasticJob& job) {
  return impl_->live_on(job);
}
void Trainer::load_optimizer(StateDict state) {
  impl_->optimizer_state_ = std::move(state);
}
void Trainer::save(CheckpointFolder& folder, CheckpointOverlap overlap) {
  impl_->fitted("save").save(folder, overlap);
}
void Trainer::save_snapshot(CheckpointFolder& folder) {
  impl_->fitted("save_snapshot").save(folder, CheckpointOverlap::skip, /*may_be_lost=*/true);
}
void Trainer::finish_saves() {
  impl_->fitted("finish_saves").finish_saves();
}
StateDict Trainer::model_state() {
  return impl_->fitted("model_state").model_state();
}
void Trainer::save_weights(const std::filesystem::path& path,
                           const std::map<std::string, std::string>& metadata) {
  const StateDict tensors = model_state();
  if (is_first_rank()) lockstep::save_weights(tensors, path, metadata);
}
const World& Trainer::world() const {
  return impl_->world_;
}
const TrainerOptions& Trainer::options() const {
  return impl_->options_;
}
int64_t Trainer::global_step() const {
  return impl_->fitted("global_step").steps().step();
}
int64_t Trainer::current_epoch() const {
  return impl_->fitted("current_epoch").epoch();
}
bool Trainer::is_first_rank() const {
  return world().rank() == 0;
}

}  // namespace lockstep
