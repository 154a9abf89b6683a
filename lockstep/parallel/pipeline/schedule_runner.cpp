#include "lockstep/parallel/pipeline/schedule_runner.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace lockstep::detail {
namespace {

ShapeKey key_of(const at::Tensor& input, bool records_graph) {
  ShapeKey key = input.sizes().vec();
  key.push_back(static_cast<int64_t>(input.scalar_type()));
  key.push_back(records_graph ? 1 : 0);
  return key;
}

}  // namespace

ScheduleRunner::ScheduleRunner(int rank, int num_ranks, const std::vector<Layer>& layers,
                               const std::vector<size_t>& starts, const StageOptions& options,
                               StageLink& link)
    : rank_(rank),
      num_ranks_(num_ranks),
      num_stages_(static_cast<int>(starts.size())),
      link_(link) {
  for (auto stage = static_cast<size_t>(rank); stage < starts.size();
       stage += static_cast<size_t>(num_ranks)) {
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : layers.size();
    const auto first = layers.begin();
    stages_.push_back(std::make_unique<Stage>(
        std::vector<Layer>(first + static_cast<std::ptrdiff_t>(starts[stage]),
                           first + static_cast<std::ptrdiff_t>(end)),
        options));
  }
}

void ScheduleRunner::run(const PipelineSchedule& schedule, const std::vector<at::Tensor>& inputs,
                         const MicroBatchLoss& loss) {
  inputs_ = &inputs;
  loss_ = &loss;
  here_.clear();
  std::vector<ShapeKey> keys;
  for (const at::Tensor& input : inputs) keys.push_back(key_of(input, /*records_graph=*/true));
  link_.begin(std::move(keys));
  for (const auto& stage : stages_) stage->begin(schedule.num_micro_batches);
  for (const PipelineAction& action : schedule.actions.at(static_cast<size_t>(rank_))) {
    perform(action);
  }
  link_.flush();
  link_.finish();
}

/// Sends and receives between two computations start together.
void ScheduleRunner::perform(const PipelineAction& action) {
  const int stage = action.stage, i = action.micro_batch;
  const ParcelId to_next{Parcel::activation, stage + 1, i},
      to_before{Parcel::gradient, stage - 1, i};
  if (is_compute(action.op)) link_.flush();
  switch (action.op) {
    case PipelineOp::forward:
      return forward(action);
    case PipelineOp::backward:
    case PipelineOp::backward_input: {
      const at::Tensor gradient =
          is_last(stage) ? at::Tensor() : take({Parcel::gradient, stage, i});
      Stage& here = stage_of(stage);
      const at::Tensor result = action.op == PipelineOp::backward
                                    ? here.backward(i, gradient)
                                    : here.backward_input(i, gradient);
      if (stage > 0) give(to_before, result);
      return;
    }
    case PipelineOp::backward_weight:
      return stage_of(stage).backward_weight(i);
    case PipelineOp::send_forward:
      return link_.send(to_next, here_.extract(to_next).mapped());
    case PipelineOp::send_backward: {
      const at::Tensor gradient = here_.extract(to_before).mapped();
      if (gradient.defined()) link_.send(to_before, gradient);
      return;
    }
    case PipelineOp::recv_forward:
      return link_.expect({Parcel::activation, stage, i});
    case PipelineOp::recv_backward:
      return link_.expect({Parcel::gradient, stage, i});
  }
}

void ScheduleRunner::forward(const PipelineAction& action) {
  const int stage = action.stage, i = action.micro_batch;
  Stage& here = stage_of(stage);
  at::Tensor input = stage == 0 ? inputs_->at(static_cast<size_t>(i)).to(here.device()).detach()
                                : take({Parcel::activation, stage, i});
  if (is_last(stage)) return here.forward_with_loss(i, std::move(input), *loss_);
  give({Parcel::activation, stage + 1, i}, here.forward(i, std::move(input)));
}

void ScheduleRunner::give(const ParcelId& id, const at::Tensor& tensor) {
  here_[id] = tensor;
}

at::Tensor ScheduleRunner::take(const ParcelId& id) {
  const auto from = id.kind == Parcel::activation ? id.stage - 1 : id.stage + 1;
  if (!is_here(from)) return link_.take(id);
  const at::Tensor given = here_.extract(id).mapped();
  if (id.kind == Parcel::gradient) return given;
  return given.detach().to(stage_of(id.stage).device()).set_requires_grad(given.requires_grad());
}

at::Tensor ScheduleRunner::predict(const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  link_.begin({key_of(input, /*records_graph=*/false)});
  at::Tensor output;
  for (int stage = rank_; stage < num_stages_; stage += num_ranks_) {
    Stage& here = stage_of(stage);
    at::Tensor x = output;
    if (stage == 0) {
      x = input.to(here.device());
    } else if (!is_here(stage - 1)) {
      const ParcelId id{Parcel::activation, stage, 0};
      link_.expect(id);
      link_.flush();
      x = link_.take(id);
    }
    output = here.run(x.to(here.device()));
    if (is_last(stage)) break;
    if (!is_here(stage + 1)) {
      link_.send({Parcel::activation, stage + 1, 0}, output);
      link_.flush();
    }
  }
  link_.finish();
  return is_here(num_stages_ - 1) ? output : at::Tensor();
}

}  // namespace lockstep::detail
