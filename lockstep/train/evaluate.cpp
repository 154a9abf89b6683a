#include "lockstep/train/evaluate.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "lockstep/parallel/module_state.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/training_context.h"

namespace lockstep {
namespace {

/// Puts a module into evaluation mode, and later each of its modules into the mode that it had.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& root)
      : root_(root), was_training_(root.is_training()), parts_(root.modules(false)) {
    for (const auto& part : parts_) modes_.push_back(part->is_training());
    root.eval();
  }
  ~EvaluationMode() {
    root_.train(was_training_);
    // A module's mode reaches those below it, which come after it here.
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (parts_[i]->is_training() != modes_[i]) parts_[i]->train(modes_[i]);
    }
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& root_;
  const bool was_training_;
  const std::vector<std::shared_ptr<torch::nn::Module>> parts_;
  std::vector<bool> modes_;
};

/// Those of the parts by their strategies, and those of no part, which each rank trained with.
void share_buffers(TrainingModuleBase& module, const detail::TrainedParts& parts,
                   const ProcessGroup& group) {
  if (parts.empty()) return detail::share_buffers(module, group);
  std::unordered_set<const c10::TensorImpl*> shared;
  for (const auto& part : parts) {
    part->strategy().share_buffers();
    for (const at::Tensor& buffer : part->module().buffers()) {
      shared.insert(buffer.unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> others;
  for (const at::Tensor& buffer : module.buffers()) {
    const bool is_new = buffer.defined() && shared.insert(buffer.unsafeGetTensorImpl()).second;
    if (is_new) others.push_back(buffer);
  }
  if (group.size() > 1) detail::broadcast_tensors(others, group);
}

/// Within the predictions of all parts from `first` on: each makes its own parameters usable.
void within(const detail::TrainedParts& parts, size_t first, const std::function<void()>& body) {
  if (first == parts.size()) return body();
  parts[first]->strategy().predict(
      [&] {
        within(parts, first + 1, body);
        return at::Tensor();
      },
      {});
}

/// The module notes the metrics of a batch, by whichever way the strategies run it. False: another
/// rank has the output.
bool run_batch(TrainingModuleBase& module, const detail::TrainedParts& parts,
               const detail::AnyBatch& batch, int64_t index) {
  SupervisedModule* const supervised = module.as_supervised();
  if (!supervised || parts.empty()) {
    within(parts, 0, [&] { module.run_validation_step(batch, index); });
    return true;
  }
  const Batch& own = batch.as<Batch>();
  const auto output =
      parts.front()->strategy().predict([&] { return supervised->forward(own.data); }, own.data);
  if (output) supervised->validate(SupervisedModule::in_float32(*output), own.target);
  return output.has_value();
}

}  // namespace

Metrics evaluate(TrainingModuleBase& module, const detail::TrainedParts& parts,
                 detail::BatchFeed& feed, const ProcessGroup& group, int64_t limit_batches,
                 const std::function<bool()>& go_on, int64_t logical_shards) {
  const at::NoGradGuard no_grad;
  const EvaluationMode mode(module);
  share_buffers(module, parts, group);
  detail::TrainingContext context{.device = feed.device()};
  const detail::TrainingContext::Scope scope(module, context);
  ShardSums sums(feed.shards());
  feed.start(0, 0);
  const auto run_batches = [&](int64_t index) {
    for (size_t shard = 0; shard < sums.size(); ++shard) {
      feed.select(shard);
      if (!feed.next_without_padding()) return false;
      if (run_batch(module, parts, feed.batch(), index))
        context.sums.samples += module.samples_of(feed.batch());
      if (feed.has_samples()) sums[shard].add(context.sums);
      context.sums = {};
    }
    return true;
  };
  const auto wanted = [&](int64_t batch) { return limit_batches == 0 || batch < limit_batches; };
  for (int64_t used = 0; wanted(used) && run_batches(used); ++used) {
    if (go_on && !go_on()) return {};
  }
  const Metrics metrics =
      metrics_of(reduce_over_shards(group, feed.device(), sums, logical_shards));
  module.on_validation_epoch_end(metrics);
  return metrics;
}

}  // namespace lockstep
