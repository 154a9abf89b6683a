#include "lockstep/train/step_loop.h"

#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// A loss from which backward cannot start is better named here than by autograd.
void check_loss(const at::Tensor& loss) {
  if (loss.defined() && loss.numel() == 1 && loss.requires_grad()) return;
  const std::string what = "the loss of a training step ";
  if (!loss.defined()) {
    throw UsageError(what + "is an undefined tensor",
                     "training_step must return the loss; a module that calls update itself says "
                     "so by automatic_optimization()");
  }
  if (loss.numel() != 1) {
    throw UsageError(what + "has shape " + c10::str(loss.sizes()) + ", expected one number",
                     "take its mean, or its sum");
  }
  throw UsageError(what + "does not depend on any parameter that needs a gradient");
}

}  // namespace

StepLoop::StepLoop(detail::TrainTask& task, const ProcessGroup& group,
                   const TrainerOptions& options)
    : task_(task),
      options_(options),
      automatic_(task.module->automatic_optimization()),
      supervised_(task.module->as_supervised()),
      steps_of_epoch_(steps_in(batches_per_epoch())),
      parts_(detail::make_parts(task.module, group, task.train->device(), options,
                                steps_of_epoch_ * options.max_epochs,
                                [&task] { return task.train->example_input(); })),
      shares_(parts_.front()->strategy().data_share().size),
      start_(std::chrono::steady_clock::now()) {
  context_.device = task.train->device();
  if (!automatic_) {
    context_.update = [this](const std::string& name, const std::function<at::Tensor()>& loss,
                             bool last_of_step) { return update(name, loss, last_of_step); };
  }
  cast_batches(*task.train);
  if (task.validation) cast_batches(*task.validation);
}

void StepLoop::cast_batches(detail::BatchFeed& feed) const {
  const auto dtype = parts_.front()->precision().convert_input(at::zeros({1})).scalar_type();
  if (dtype != at::kFloat) feed.cast_to(dtype);
}

bool StepLoop::run_epoch(int64_t epoch, int64_t first_batch, const AfterStep& after_step) {
  const detail::TrainingContext::Scope scope(*task_.module, context_);
  context_.epoch = epoch;
  context_.sums = {};
  tell_if_evaluating();
  task_.module->on_train_epoch_start(epoch);
  const int64_t batches = batches_per_epoch();
  const int64_t accumulate_batches = options_.accumulate_grad_batches;
  total_steps_ = total_steps(epoch, first_batch);
  task_.train->start(epoch, first_batch);
  step_start_ = part_start_ = own_seconds();
  for (int64_t i = first_batch, end = i; i < batches; i = end) {
    // The last step of an epoch has fewer batches when they do not divide evenly.
    const int64_t first_of_step = i - i % accumulate_batches;
    batches_of_step_ = std::min(accumulate_batches, batches - first_of_step);
    end = first_of_step + batches_of_step_;
    if (!run_step(i, end)) break;
    if (automatic_) {
      if (before_step_) before_step_(step_ + 1);
      detail::TrainedPart& part = *parts_.front();
      const auto again = [&] { return loss_once_more(part, work_of(end - 1, true)); };
      part.finish_step(step_ + 1, epoch, {loss_.mean(), again});
    }
    count(times_.optimizer);
    context_.step = ++step_;
    if (!after_step(result_of(epoch, end))) return false;
    step_start_ = part_start_ = own_seconds();
  }
  for (const auto& part : parts_) part->end_epoch(epoch, first_batch == 0 && skipped_ == 0);
  task_.module->on_train_epoch_end(epoch);
  return true;
}

/// Modes are the user's. A module that was evaluated before, and is still in that mode, is more
/// often forgotten than meant.
void StepLoop::tell_if_evaluating() {
  const auto training = [](const auto& part) { return part->is_training(); };
  const auto parts = task_.module->modules(/*include_self=*/false);
  if (task_.module->is_training() || std::ranges::any_of(parts, training)) return;
  if (std::exchange(told_evaluating_, true) || parts_.front()->strategy().group().rank() != 0)
    return;
  log_warning(
      "the module is trained in evaluation mode, in which it was given: dropout does nothing, and "
      "batch norm keeps its statistics. Call train() of it for training mode");
}

/// False where the loader has no further batch.
bool StepLoop::run_step(int64_t first, int64_t end) {
  for (shard_ = 0; shard_ < task_.train->shards(); ++shard_) {
    task_.train->select(shard_);
    for (int64_t i = first; i < end; ++i) {
      if (!task_.train->next()) return false;
      count(times_.data);
      run_batch(i, /*last_of_step=*/i == end - 1);
      count(times_.compute);
    }
  }
  return true;
}

int64_t StepLoop::total_steps(int64_t epoch, int64_t batches) const {
  if (epoch >= options_.max_epochs) return step_;
  return step_ + steps_in(batches_per_epoch() - batches) +
         steps_of_epoch_ * (options_.max_epochs - epoch - 1);
}

bool StepLoop::skip(int64_t samples) {
  if (samples == skipped_) return true;
  skipped_ = samples;
  return task_.train->skip(samples);
}

int64_t StepLoop::samples_after(int64_t batches) const {
  const int64_t of_batch = task_.train->samples_per_batch();
  return of_batch > 0 ? skipped_ + batches * of_batch : -1;
}

StepResult StepLoop::result_of(int64_t epoch, int64_t batches) {
  StepResult result;
  result.step = step_;
  result.total_steps = total_steps_;
  result.epoch = epoch;
  result.batches = batches;
  result.samples = std::exchange(samples_of_step_, 0) * shares_;
  result.lr = lr();
  result.loss = loss_.mean();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  result.own_seconds = own_seconds() - step_start_;
  return result;
}

/// Of this thread, since some moment.
double StepLoop::own_seconds() const {
  const auto all = std::chrono::steady_clock::now() - start_;
  return std::chrono::duration<double>(all - time_held_up()).count();
}

/// Adds the time since the last part ended.
void StepLoop::count(double& part) {
  const double now = own_seconds();
  part += now - std::exchange(part_start_, now);
}

void StepLoop::run_batch(int64_t index, bool last_of_step) {
  loss_ = {};
  if (automatic_) {
    detail::TrainedPart& part = *parts_.front();
    part.begin_step();
    part.strategy().run_batch(work_of(index, last_of_step));
  } else {
    task_.module->run_training_step(task_.train->batch(), index);
  }
  if (shard_ == 0) samples_of_step_ += task_.module->samples_of(task_.train->batch());
  note_batch();
}

/// The loss of a batch that has been run, for an optimizer that wants to know. What the batch told
/// of itself the first time stands.
double StepLoop::loss_once_more(detail::TrainedPart& part, const BatchWork& work) {
  const BatchLoss told = std::exchange(loss_, {});
  const MetricSums noted = context_.sums;
  part.strategy().run_batch(work);
  context_.sums = noted;
  return std::exchange(loss_, told).mean();
}

BatchWork StepLoop::work_of(int64_t index, bool last_of_step) {
  BatchWork work;
  work.last_of_step = last_of_step;
  if (options_.strategy_options.logical_shards) {
    const int64_t first = parts_.front()->strategy().data_share().rank;
    work.shard = {step_, first + static_cast<int64_t>(shard_)};
  }
  work.loss = [this, index] {
    const at::Tensor loss = task_.module->run_training_step(task_.train->batch(), index);
    return judged(*parts_.front(), loss, task_.module->samples_of(task_.train->batch()));
  };
  if (!supervised_) return work;
  const Batch& batch = task_.train->batch().as<Batch>();
  work.input = batch.data;
  work.target = batch.target;
  work.criterion = [this](const at::Tensor& output, const at::Tensor& target) {
    return judged(*parts_.front(), supervised_->measured_loss(output, target), target.size(0));
  };
  return work;
}

at::Tensor StepLoop::judged(detail::TrainedPart& part, const at::Tensor& loss, int64_t rows) {
  check_loss(loss);
  const double value = loss.item<double>();
  loss_.sum += value * static_cast<double>(rows);
  loss_.rows += rows;
  loss_.is_bad = loss_.is_bad || !std::isfinite(value);
  return part.judged(loss, value, batches_of_step_);
}

/// Of a batch whose loss is not finite, and which is skipped for that, only the samples count.
void StepLoop::note_batch() {
  MetricSums& noted = context_.sums;
  if (loss_.is_bad && options_.on_nan == OnNan::skip) {
    noted = {};
  } else if (automatic_ && noted.loss.weight == 0) {
    noted.loss = {loss_.sum, static_cast<double>(loss_.rows)};
  }
  // Of ranks that share a batch, those count it that have its loss.
  noted.samples = automatic_ ? loss_.rows : task_.module->samples_of(task_.train->batch());
  sums_.resize(task_.train->shards());
  sums_[shard_].add(noted);
  noted = {};
}

detail::TrainedPart& StepLoop::part_named(const std::string& name) const {
  for (const auto& part : parts_) {
    if (part->name() == name || (parts_.size() == 1 && name.empty())) return *part;
  }
  std::vector<std::string> names;
  for (const auto& part : parts_) names.push_back(part->name());
  throw UsageError(unknown_word("optimizer", name, names));
}

double StepLoop::update(const std::string& name, const std::function<at::Tensor()>& loss,
                        bool last_of_step) {
  detail::TrainedPart& part = part_named(name);
  const auto thaw = c10::make_scope_exit([frozen = detail::freeze_others(parts_, part)] {
    for (at::Tensor parameter : frozen) parameter.set_requires_grad(true);
  });
  double value = 0;
  BatchWork work;
  work.last_of_step = last_of_step;
  work.loss = [&] {
    const at::Tensor result = loss();
    check_loss(result);
    value = result.item<double>();
    return judged(part, result, 1);
  };
  if (warming_up_) {
    part.strategy().warm_up(work);
    return value;
  }
  part.begin_step();
  part.strategy().run_batch(work);
  if (last_of_step) {
    const double first = value;
    part.finish_step(step_ + 1, context_.epoch,
                     {first, [&] { return loss_once_more(part, work); }});
    return first;
  }
  return value;
}

void StepLoop::warm_up() {
  const detail::TrainingContext::Scope scope(*task_.module, context_);
  task_.train->take_example();
  warming_up_ = true;
  if (automatic_) {
    parts_.front()->strategy().warm_up(work_of(0, /*last_of_step=*/true));
  } else {
    task_.module->run_training_step(task_.train->batch(), 0);
  }
  warming_up_ = false;
  context_.sums = {};
}

int64_t StepLoop::batches_per_epoch() const {
  const int64_t all = task_.train->batches_per_epoch();
  if (options_.limit_train_batches == 0) return all;
  const int64_t of_batch = std::max<int64_t>(task_.train->samples_per_batch(), 1);
  const int64_t left = options_.limit_train_batches - ceil_div(skipped_, of_batch);
  return std::clamp<int64_t>(left, 0, all);
}

int64_t StepLoop::steps_in(int64_t batches) const {
  return ceil_div(batches, options_.accumulate_grad_batches);
}

/// With automatic optimization a step is an update.
std::map<std::string, double> StepLoop::values() const {
  std::map<std::string, double> values;
  if (automatic_) return values;
  for (const auto& part : parts_) {
    values["updates." + part->name()] = static_cast<double>(part->updates());
  }
  return values;
}

void StepLoop::load_values(int64_t step, const std::map<std::string, double>& values) {
  context_.step = step_ = step;
  for (const auto& part : parts_) {
    const auto found = values.find("updates." + part->name());
    part->set_updates(found == values.end() ? step : static_cast<int64_t>(found->second));
  }
}

}  // namespace lockstep
