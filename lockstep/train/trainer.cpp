#include "lockstep/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/parallel/logical_shards.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/train/callback.h"
#include "lockstep/train/evaluate.h"
#include "lockstep/train/fit_loop.h"
#include "lockstep/train/kept_state.h"
#include "lockstep/train/same_settings.h"
#include "lockstep/train/trained_part.h"
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

double rounded(double value, double places) {
  return std::round(value * places) / places;
}

/// In the order in which rows of JSON have them.
MetricValues values_of(int64_t epoch, const Metrics& metrics, double lr, double samples_per_s,
                       double seconds) {
  MetricValues values{{"epoch", static_cast<double>(epoch + 1)},
                      {"loss", metrics.loss},
                      {"accuracy", metrics.accuracy},
                      {"lr", lr},
                      {"samples_per_s", std::round(samples_per_s)},
                      {"seconds", rounded(seconds, 1e3)}};
  const size_t own = values.size();
  for (const auto& [name, value] : metrics.values) {
    const bool is_taken = std::any_of(values.begin(), values.begin() + static_cast<long>(own),
                                      [&](const auto& one) { return one.first == name; });
    if (!is_taken) values.emplace_back(name, value);
  }
  return values;
}

/// Tells a Trainer's loggers how a fit goes. On rank 0, before all other callbacks.
class LogToLoggers : public Callback {
 public:
  /// `options` must outlive it.
  explicit LogToLoggers(const TrainerOptions& options) : options_(options) {}
  void on_start(Trainer& trainer) override {
    const double now =
        std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    begun_ = 0;
    for (const auto& logger : options_.loggers) {
      logger->begin(trainer.global_step(), trainer.current_epoch());
      ++begun_;
      logger->log(trainer.global_step(),
                  {{"unix_time", rounded(now, 1)},
                   {"ranks", static_cast<double>(trainer.world().size())},
                   {"restarts", static_cast<double>(restarts_)}},
                  "run");
      if (!options_.hyperparameters.empty()) logger->log_hyperparameters(options_.hyperparameters);
    }
  }
  void on_log(Trainer& trainer, const LogResult& result) override {
    const StepResult& step = result.step;
    MetricValues values =
        values_of(step.epoch, result.metrics, step.lr, result.samples_per_s, step.seconds);
    if (result.save_seconds > 0)
      values.emplace_back("save_seconds", rounded(result.save_seconds, 1e6));
    std::vector<MetricValues> ranks;
    for (const RankTimes& times : result.ranks) {
      ranks.push_back({{"data_s", rounded(times.data, 1e6)},
                       {"compute_s", rounded(times.compute, 1e6)},
                       {"optimizer_s", rounded(times.optimizer, 1e6)},
                       {"waiting_s", rounded(times.waiting, 1e6)},
                       {"other_s", rounded(times.other, 1e6)},
                       {"memory_bytes", times.memory}});
    }
    for (const auto& logger : options_.loggers) {
      logger->log(step.step, values, "train");
      logger->log_ranks(step.step, ranks);
    }
    if (options_.log_histograms.weights) log_histograms(step.step, /*gradients=*/false);
  }
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override {
    if (result.test.samples == 0) return;
    for (const auto& logger : options_.loggers) {
      logger->log(result.step,
                  values_of(result.epoch, result.test, result.lr, result.test_samples_per_s,
                            result.seconds),
                  "test");
      logger->flush();
    }
  }

  /// A fit of these parts, which must outlive it, is to start. Ranks have started again so often.
  void prepare(const detail::TrainedParts& parts, int64_t restarts) {
    parts_ = &parts;
    restarts_ = restarts;
  }
  /// Where all gradients of a step are there.
  void before_step(int64_t step) {
    const bool wanted = options_.log_histograms.gradients && step % options_.log_every_n_steps == 0;
    if (wanted) log_histograms(step, /*gradients=*/true);
  }
  /// The fit has ended; of what, where it failed.
  void close(const std::string& failure) {
    for (size_t i = 0; i < begun_; ++i) options_.loggers[i]->close(failure);
  }

 private:
  void log_histograms(int64_t step, bool gradients) {
    for (const auto& part : *parts_) {
      const std::string prefix =
          (gradients ? "gradients/" : "weights/") + (parts_->size() > 1 ? part->name() + "." : "");
      for (const auto& item : part->module().named_parameters()) {
        const at::Tensor& values = gradients ? item.value().grad() : item.value();
        if (!values.defined() || values.numel() == 0) continue;
        for (const auto& logger : options_.loggers)
          logger->log_histogram(step, prefix + item.key(), values);
      }
    }
  }

  const TrainerOptions& options_;
  const detail::TrainedParts* parts_ = nullptr;
  int64_t restarts_ = 0;
  size_t begun_ = 0;  ///< So many loggers, in order. Others are not to be opened for a failure.
};

}  // namespace

class Trainer::Impl {
 public:
  Impl(const World& world, TrainerOptions options) : world_(world), options_(std::move(options)) {
    check_ranges(options_);
    if (world.rank() == 0 && !options_.loggers.empty()) {
      logged_ = std::make_shared<LogToLoggers>(options_);
      callbacks_.push_back(logged_);
    }
    if (!options_.strategy_options.logical_shards) {
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
    if (!logged_) return fit_->run();
    const int64_t generation = job_ ? job_->generation() : 0;
    logged_->prepare(fit_->steps().parts(),
                     env_int("TORCHELASTIC_RESTART_COUNT").value_or(0) + generation);
    fit_->before_step([this](int64_t step) { logged_->before_step(step); });
    try {
      FitResult result = fit_->run();
      logged_->close({});
      return result;
    } catch (const std::exception& error) {
      logged_->close(error.what());
      throw;
    }
  }
  /// The latest fit. `what` is the function that needs one.
  FitLoop& fitted(const char* what) const {
    if (fit_) return *fit_;
    throw UsageError(std::string("Trainer::") + what + " was called before fit",
                     "call it in a callback or after fit");
  }

  const World& world_;
  ElasticJob* job_ = nullptr;
  bool fitted_ = false;
  TrainerOptions options_;
  std::shared_ptr<LogToLoggers> logged_;  ///< On rank 0, where there are loggers.
  std::vector<std::shared_ptr<Callback>> callbacks_;
  std::optional<StoredCheckpoint> checkpoint_;  ///< From which the next fit goes on.
  StateDict optimizer_state_;                   ///< With which the next fit begins; empty: none.
  std::unique_ptr<FitLoop> fit_;
};

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
  check_same_settings({{"batches of an evaluation", std::to_string(feed.batches_per_epoch())},
                       {"limit_val_batches", std::to_string(options().limit_val_batches)}},
                      world().group());
  feed.move_to(world().device());
  if (impl_->fit_ && &impl_->fit_->module() == &module) {
    detail::check_share(feed, impl_->fit_->steps().parts().front()->strategy().data_share(),
                        "with strategy " + options().strategy + " this rank evaluates");
    impl_->fit_->steps().cast_batches(feed);
    return impl_->fit_->evaluate(feed);
  }
  detail::check_share(feed, {world().rank(), world().size()}, "this rank evaluates");
  module.to(world().device());
  return evaluate(module, {}, feed, world().group(), options().limit_val_batches);
}
void Trainer::restore(StoredCheckpoint checkpoint) {
  const std::string changed = changed_settings(checkpoint.info.settings, options().settings);
  if (is_first_rank() && !changed.empty()) {
    log_warning("this run goes on with other settings: " + changed +
                "; its course is not that of a run without an interruption");
  }
  impl_->checkpoint_ = std::move(checkpoint);
}
std::optional<CheckpointInfo> Trainer::live_on(ElasticJob& job) {
  impl_->job_ = &job;
  const auto kept = detail::share_kept_state(
      std::static_pointer_cast<const StoredCheckpoint>(job.kept()), world());
  if (!kept) return std::nullopt;
  job.kept() = kept;
  impl_->checkpoint_ = *kept;
  return kept->info;
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
int64_t Trainer::total_steps() const {
  return impl_->fitted("total_steps").total_steps();
}
int64_t Trainer::current_epoch() const {
  return impl_->fitted("current_epoch").epoch();
}
bool Trainer::is_first_rank() const {
  return world().rank() == 0;
}

}  // namespace lockstep
