#include "lockstep/parallel/pipeline/schedule_runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/autograd/backward.h"
#include "lockstep/autograd/recorded_state.h"

namespace lockstep::detail {
namespace {

ShapeKey key_of(const at::Tensor& input, bool records_graph) {
  ShapeKey key = input.sizes().vec();
  key.push_back(static_cast<int64_t>(input.scalar_type()));
  key.push_back(records_graph ? 1 : 0);
  return key;
}

}  // namespace

/// Some layers, one after the other, and what they keep between forward and backward of each
/// micro-batch. One thread.
class Stage {
 public:
  Stage(std::vector<Layer> layers, StageOptions options)
      : layers_(std::move(layers)), options_(std::move(options)) {
    for (const Layer& layer : layers_) {
      if (!layer.module) continue;
      for (const at::Tensor& tensor : layer.module->parameters()) parameters_.push_back(tensor);
      for (const at::Tensor& tensor : layer.module->buffers()) buffers_.push_back(tensor);
    }
  }

  const c10::Device& device() const { return options_.device; }

  /// The layers, and the loss where there are targets, without anything kept.
  at::Tensor run(const at::Tensor& input, const MicroBatches* batches = nullptr,
                 int micro_batch = 0) const {
    const auto context = options_.forward_context ? options_.forward_context() : nullptr;
    at::Tensor x = input;
    for (const Layer& layer : layers_) x = layer.forward(x);
    return batches == nullptr ? x : batches->loss(micro_batch, x);
  }

  void begin(int micro_batches) {
    kept_.clear();
    kept_.resize(static_cast<size_t>(micro_batches));
  }
  /// `input` is a leaf. Gives the output, for the next stage: it requires a gradient when backward
  /// wants one. `batches`: of the last stage, which gives nothing on.
  at::Tensor forward(int micro_batch, at::Tensor input, const MicroBatches* batches) {
    Kept& kept = this->kept(micro_batch);
    kept.input = std::move(input);
    kept.batches = batches;
    if (!options_.recompute_activations) return root_of(micro_batch);
    // Nobody waits for the output of the last stage: it is made when backward needs it.
    if (batches != nullptr) return {};
    const auto alone = lock_forward();
    kept.state = RecordedState::record({options_.device}, /*random=*/true);
    const at::NoGradGuard no_grad;
    at::Tensor output = run(kept.input).detach();
    const bool wanted = output.is_floating_point() &&
                        (kept.input.requires_grad() ||
                         std::ranges::any_of(parameters_, &at::Tensor::requires_grad));
    return output.set_requires_grad(wanted);
  }
  /// `gradient` is that of the output; undefined on the last stage. Gives the input's gradient,
  /// undefined when nobody wants it. `halved`: `backward_weight` does the rest.
  at::Tensor backward(int micro_batch, const at::Tensor& gradient, bool halved) {
    const at::Tensor root = root_of(micro_batch);
    Kept& kept = this->kept(micro_batch);
    if (root.requires_grad()) {
      halved ? static_cast<void>(kept.split.emplace(root, gradient, kept.input))
             : lockstep::backward(root, gradient);
    }
    kept.output = at::Tensor();
    return input_gradient(kept);
  }
  void backward_weight(int micro_batch) {
    auto& split = kept(micro_batch).split;
    if (split) split->finish();
    split.reset();
  }

 private:
  struct Kept {
    at::Tensor input;
    at::Tensor output;                      ///< Or the loss.
    const MicroBatches* batches = nullptr;  ///< Where a loss is to be made.
    std::optional<RecordedState> state;     ///< With which forward ran.
    std::optional<SplitBackward> split;
  };
  /// Held while this stage draws random numbers that must be drawn once more.
  std::unique_lock<std::mutex> lock_forward() const {
    if (!options_.recompute_activations || !options_.one_forward) return {};
    return std::unique_lock(*options_.one_forward);
  }
  /// The output, or the loss, whose graph backward is to walk. A second forward has the random
  /// numbers of the first one, and makes no second change to buffers such as running means.
  at::Tensor root_of(int micro_batch) {
    Kept& kept = this->kept(micro_batch);
    if (kept.output.defined()) return kept.output;
    const auto alone = lock_forward();
    std::optional<RecordedState::Replay> as_before;
    std::vector<at::Tensor> before;
    if (kept.state) {
      as_before.emplace(*kept.state);
      for (const at::Tensor& buffer : buffers_) before.push_back(buffer.clone());
    }
    kept.output = run(kept.input, kept.batches, micro_batch);
    // Not counted as a change: the graph may hold them, as that of batch norm does.
    for (size_t i = 0; i < before.size(); ++i) buffers_[i].variable_data().copy_(before[i]);
    return kept.output;
  }
  at::Tensor input_gradient(Kept& kept) const {
    const at::Tensor input = std::exchange(kept.input, {});
    if (!input.requires_grad()) return {};
    // The stage before waits for one, also where the output does not depend on the input.
    return input.grad().defined() ? input.grad() : at::zeros_like(input);
  }
  Kept& kept(int micro_batch) { return kept_.at(static_cast<size_t>(micro_batch)); }

  std::vector<Layer> layers_;
  StageOptions options_;
  std::vector<at::Tensor> parameters_;  ///< Of the layers' modules.
  std::vector<at::Tensor> buffers_;
  std::vector<Kept> kept_;
};

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

ScheduleRunner::~ScheduleRunner() = default;

void ScheduleRunner::run(const PipelineSchedule& schedule, const MicroBatches& batches) {
  batches_ = &batches;
  here_.clear();
  std::vector<ShapeKey> keys;
  for (const at::Tensor& input : batches.inputs())
    keys.push_back(key_of(input, /*records_graph=*/true));
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
      const at::Tensor result =
          stage_of(stage).backward(i, gradient, action.op == PipelineOp::backward_input);
      if (stage > 0) here_[to_before] = result;
      return;
    }
    case PipelineOp::backward_weight:
      return stage_of(stage).backward_weight(i);
    case PipelineOp::send_forward:
      return link_.send(to_next, here_.extract(to_next).mapped());
    case PipelineOp::send_backward:
      return link_.send(to_before, here_.extract(to_before).mapped());
    case PipelineOp::recv_forward:
      return link_.expect({Parcel::activation, stage, i});
    case PipelineOp::recv_backward:
      return link_.expect({Parcel::gradient, stage, i});
  }
}

void ScheduleRunner::forward(const PipelineAction& action) {
  const int stage = action.stage, i = action.micro_batch;
  Stage& here = stage_of(stage);
  at::Tensor input = stage == 0
                         ? batches_->inputs().at(static_cast<size_t>(i)).to(here.device()).detach()
                         : take({Parcel::activation, stage, i});
  at::Tensor output = here.forward(i, std::move(input), is_last(stage) ? batches_ : nullptr);
  if (!is_last(stage)) here_[{Parcel::activation, stage + 1, i}] = std::move(output);
}

/// An activation comes as a leaf.
at::Tensor ScheduleRunner::take(const ParcelId& id) {
  const auto from = id.kind == Parcel::activation ? id.stage - 1 : id.stage + 1;
  const at::Tensor given = is_here(from) ? here_.extract(id).mapped() : link_.take(id);
  if (!given.defined()) return {};
  return given.detach().to(stage_of(id.stage).device()).set_requires_grad(given.requires_grad());
}

at::Tensor ScheduleRunner::predict(const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  link_.begin({key_of(input, /*records_graph=*/false)});
  at::Tensor output;
  for (int stage = rank_; stage < num_stages_; stage += num_ranks_) {
    Stage& here = stage_of(stage);
    output = here.run(stage == 0 ? input.to(here.device()) : take({Parcel::activation, stage, 0}));
    if (is_last(stage)) break;
    const ParcelId next{Parcel::activation, stage + 1, 0};
    if (is_here(stage + 1)) {
      here_[next] = output;
      continue;
    }
    link_.send(next, output);
    link_.flush();
  }
  link_.finish();
  return is_here(num_stages_ - 1) ? output : at::Tensor();
}

}  // namespace lockstep::detail
