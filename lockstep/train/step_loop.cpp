#include "lockstep/train/step_loop.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/autograd/backward.h"
#include "lockstep/train/loss.h"
#include "lockstep/train/memory_format.h"

namespace lockstep {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

StepLoop::StepLoop(TrainTask& task, const ProcessGroup& group, const TrainerOptions& options)
    : task_(task),
      group_(group),
      options_(options),
      parameters_(task.model->parameters()),
      buffers_(task.model->buffers()),
      finite_(options.on_nan, group),
      schedule_(options.schedule),
      base_lr_(task.optimizer->lr()),
      start_(std::chrono::steady_clock::now()) {
  if (group.size() > 1) {
    ddp_ = std::make_unique<DistributedDataParallel<std::shared_ptr<Model>>>(task.model, group);
  }
  if (schedule_.total_steps == 0) schedule_.total_steps = total_steps();
}

bool StepLoop::run_epoch(int64_t epoch, int64_t first_batch, const AfterStep& after_step) {
  task_.model->train();
  const int64_t batches = batches_per_epoch();
  const int64_t accumulate_batches = options_.accumulate_grad_batches;
  task_.train->epoch(epoch, first_batch);
  const int64_t first_step = step_;
  Batch batch;
  for (int64_t i = first_batch; i < batches && task_.train->next(batch); ++i) {
    // The last step of an epoch has fewer batches when they do not divide evenly.
    const int64_t first_of_step = i - i % accumulate_batches;
    const int64_t batches_of_step = std::min(accumulate_batches, batches - first_of_step);
    const bool last_of_step = i == first_of_step + batches_of_step - 1;
    if (i == first_of_step) keep_buffers();
    if (!last_of_step) {
      accumulate(batch, batches_of_step);
      continue;
    }
    forward_and_backward(batch, batches_of_step);
    update(epoch);
    StepResult result;
    result.step = step_;
    result.total_steps = total_steps();
    result.epoch = epoch;
    result.batches = i + 1;
    result.samples = std::exchange(samples_of_step_, 0) * group_.size();
    result.lr = task_.optimizer->lr();
    result.loss = last_loss_;
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (!after_step(result)) return false;
  }
  finite_.end_epoch(epoch, step_ - first_step, first_batch == 0);
  return true;
}

/// A batch whose gradients only add up here; the last one of the step sends them to all ranks.
void StepLoop::accumulate(const Batch& batch, int64_t batches_of_step) {
  if (!ddp_) return forward_and_backward(batch, batches_of_step);
  const auto no_sync = ddp_->no_sync();
  forward_and_backward(batch, batches_of_step);
}

void StepLoop::forward_and_backward(const Batch& batch, int64_t batches_of_step) {
  const at::Tensor data =
      with_memory_format(batch.data.to(task_.device, /*non_blocking=*/true), task_.memory_format);
  const at::Tensor target = batch.target.to(task_.device, /*non_blocking=*/true);
  const at::Tensor output = ddp_ ? ddp_->forward(data) : task_.model->forward(data);
  at::Tensor loss = batch_loss(task_.loss, output, target);
  const double value = loss.item<double>();
  if (batches_of_step > 1) loss = loss / static_cast<double>(batches_of_step);
  if (finite_.loss_is_good(value)) {
    backward(loss);
  } else {
    backward(loss, at::full_like(loss, std::numeric_limits<double>::quiet_NaN()));
  }
  last_loss_ = value;
  if (options_.on_nan == OnNan::skip && !std::isfinite(value)) {
    sums_.samples += batch.size();  // its loss would hide that of all others
  } else {
    add_batch(sums_, task_.loss, value, output, target, batch.size());
  }
  samples_of_step_ += batch.size();
}

void StepLoop::update(int64_t epoch) {
  Optimizer& optimizer = *task_.optimizer;
  const double lr = scheduled_lr(schedule_, base_lr_, step_);
  if (lr != optimizer.lr()) optimizer.set_lr(lr);
  ++step_;
  if (finite_.step_is_good(parameters_, step_, epoch)) {
    if (options_.gradient_clip_val > 0) clip_grad_norm(parameters_, options_.gradient_clip_val);
    optimizer.step();
  } else {
    put_buffers_back();
  }
  zero_grad(parameters_);
}

/// Forward has put the batch into batch norm's statistics before anyone knows that it is bad.
void StepLoop::keep_buffers() {
  if (options_.on_nan != OnNan::skip) return;
  kept_buffers_.clear();
  for (const at::Tensor& buffer : buffers_) kept_buffers_.push_back(buffer.clone());
}

void StepLoop::put_buffers_back() {
  for (size_t i = 0; i < kept_buffers_.size(); ++i) buffers_[i].copy_(kept_buffers_[i]);
}

void StepLoop::warm_up_reducer() {
  if (!ddp_) return;
  task_.model->train();
  const auto zeros = [&](const SampleSpec& spec) {
    return at::zeros(spec.batch_shape(2), at::device(task_.device).dtype(spec.dtype));
  };
  const at::Tensor output =
      ddp_->forward(with_memory_format(zeros(task_.train->data_spec()), task_.memory_format));
  backward(batch_loss(task_.loss, output, zeros(task_.train->target_spec())));
  zero_grad(parameters_);
}

int64_t StepLoop::batches_per_epoch() const {
  const int64_t all = task_.train->batches_per_epoch();
  return options_.limit_train_batches > 0 ? std::min(all, options_.limit_train_batches) : all;
}

int64_t StepLoop::steps_per_epoch() const {
  return ceil_div(batches_per_epoch(), options_.accumulate_grad_batches);
}

MetricSums StepLoop::take_sums() {
  return std::exchange(sums_, {});
}

}  // namespace lockstep
