#include "lockstep/parallel/pipeline/stage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lockstep/autograd/backward.h"

namespace lockstep::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

bool needs_gradient(const at::Tensor& tensor) {
  return tensor.requires_grad();
}

}  // namespace

Stage::Stage(std::vector<Layer> layers, StageOptions options)
    : layers_(std::move(layers)), options_(std::move(options)) {
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto take = [&](const Tensors& from, Tensors& into) {
    for (const at::Tensor& tensor : from) {
      if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
        into.push_back(tensor);
      }
    }
  };
  for (const Layer& layer : layers_) {
    if (!layer.module) continue;
    take(layer.module->parameters(), parameters_);
    take(layer.module->buffers(), buffers_);
  }
}

at::Tensor Stage::run(const at::Tensor& input) const {
  const auto context = options_.forward_context ? options_.forward_context() : nullptr;
  at::Tensor x = input;
  for (const Layer& layer : layers_) x = layer.forward(x);
  return x;
}

void Stage::begin(int micro_batches) {
  kept_.clear();
  kept_.resize(static_cast<size_t>(micro_batches));
}

std::unique_lock<std::mutex> Stage::lock_forward() const {
  if (!options_.recompute_activations || !options_.one_forward) return {};
  return std::unique_lock(*options_.one_forward);
}

at::Tensor Stage::forward(int micro_batch, at::Tensor input) {
  Kept& kept = this->kept(micro_batch);
  kept.input = std::move(input);
  if (!options_.recompute_activations) {
    kept.output = run(kept.input);
    return kept.output;
  }
  const auto alone = lock_forward();
  kept.state = RecordedState::record({options_.device}, /*random=*/true);
  const at::NoGradGuard no_grad;
  at::Tensor output = run(kept.input).detach();
  const bool wanted = output.is_floating_point() &&
                      (needs_gradient(kept.input) ||
                       std::any_of(parameters_.begin(), parameters_.end(), needs_gradient));
  return output.set_requires_grad(wanted);
}

void Stage::forward_with_loss(int micro_batch, at::Tensor input, const MicroBatchLoss& loss) {
  Kept& kept = this->kept(micro_batch);
  kept.input = std::move(input);
  kept.loss = loss;
  // Nobody waits for the output of the last stage: it is made when backward needs it.
  if (!options_.recompute_activations) root_of(micro_batch);
}

/// The output, or the loss, whose graph backward is to walk.
at::Tensor Stage::root_of(int micro_batch) {
  Kept& kept = this->kept(micro_batch);
  if (kept.output.defined()) return kept.output;
  const auto alone = lock_forward();
  if (!kept.loss) return recompute(micro_batch);
  const auto context = options_.forward_context ? options_.forward_context() : nullptr;
  at::Tensor x = kept.input;
  for (const Layer& layer : layers_) x = layer.forward(x);
  kept.output = std::exchange(kept.loss, nullptr)(micro_batch, x);
  return kept.output;
}

/// The same forward once more: with the random numbers that it had, and without a second change to
/// buffers such as running means.
at::Tensor Stage::recompute(int micro_batch) {
  Kept& kept = this->kept(micro_batch);
  Tensors buffers;
  for (const at::Tensor& buffer : buffers_) buffers.push_back(buffer.clone());
  {
    const RecordedState::Replay as_before(*kept.state);
    kept.output = run(kept.input);
  }
  // Not counted as a change: the graph may hold them, as that of batch norm does.
  for (size_t i = 0; i < buffers.size(); ++i) buffers_[i].variable_data().copy_(buffers[i]);
  return kept.output;
}

at::Tensor Stage::input_gradient(Kept& kept) const {
  const at::Tensor input = std::exchange(kept.input, {});
  if (!needs_gradient(input)) return {};
  // The stage before waits for one, also where the output does not depend on the input.
  return input.grad().defined() ? input.grad() : at::zeros_like(input);
}

at::Tensor Stage::backward(int micro_batch, const at::Tensor& gradient) {
  const at::Tensor root = root_of(micro_batch);
  Kept& kept = this->kept(micro_batch);
  if (root.requires_grad()) lockstep::backward(root, gradient);
  kept.output = at::Tensor();
  return input_gradient(kept);
}

at::Tensor Stage::backward_input(int micro_batch, const at::Tensor& gradient) {
  const at::Tensor root = root_of(micro_batch);
  Kept& kept = this->kept(micro_batch);
  if (root.requires_grad()) kept.split.emplace(root, gradient, kept.input);
  kept.output = at::Tensor();
  return input_gradient(kept);
}

void Stage::backward_weight(int micro_batch) {
  auto& split = kept(micro_batch).split;
  if (split) split->finish();
  split.reset();
}

}  // namespace lockstep::detail
