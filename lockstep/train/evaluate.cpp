#include "lockstep/train/evaluate.h"

#include <ATen/core/grad_mode.h>

#include <unordered_set>
#include <vector>

#include "lockstep/parallel/module_state.h"
#include "lockstep/train/metric_sums.h"
#include "lockstep/train/training_context.h"

namespace lockstep {
namespace {

class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module)
      : module_(module), training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool training_;
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

/// What one batch notes, by whichever way the strategies run a module.
class Evaluation {
 public:
  Evaluation(TrainingModuleBase& module, const detail::TrainedParts& parts, detail::BatchFeed& feed)
      : module_(module), parts_(parts), feed_(feed), supervised_(module.as_supervised()) {}

  void run_batch(int64_t index) {
    if (supervised_ && !parts_.empty()) return run_supervised();
    within(0, [&] { module_.run_validation_step(feed_.batch(), index); });
    note_samples();
  }

  detail::TrainingContext context;

 private:
  void run_supervised() {
    const Batch& batch = feed_.batch().as<Batch>();
    const auto output = parts_.front()->strategy().predict(
        [&] { return supervised_->forward(batch.data); }, batch.data);
    if (!output) return;
    supervised_->validate(SupervisedModule::in_float32(*output), batch.target);
    note_samples();
  }

  /// Within the predictions of all parts from `first` on: each makes its own parameters usable.
  void within(size_t first, const std::function<void()>& body) {
    if (first == parts_.size()) return body();
    parts_[first]->strategy().predict(
        [&] {
          within(first + 1, body);
          return at::Tensor();
        },
        {});
  }

  void note_samples() { context.sums.samples += module_.samples_of(feed_.batch()); }

  TrainingModuleBase& module_;
  const detail::TrainedParts& parts_;
  detail::BatchFeed& feed_;
  SupervisedModule* supervised_;
};

}  // namespace

Metrics evaluate(TrainingModuleBase& module, const detail::TrainedParts& parts,
                 detail::BatchFeed& feed, const ProcessGroup& group, int64_t limit_batches,
                 const std::function<bool()>& go_on, int64_t logical_shards) {
  const at::NoGradGuard no_grad;
  const EvaluationMode mode(module);
  share_buffers(module, parts, group);
  Evaluation evaluation(module, parts, feed);
  evaluation.context.device = feed.device();
  const detail::TrainingContext::Scope scope(module, evaluation.context);
  ShardSums sums(feed.shards());
  feed.start(0, 0);
  const auto run_batches = [&](int64_t index) {
    for (size_t shard = 0; shard < sums.size(); ++shard) {
      feed.select(shard);
      if (!feed.next_without_padding()) return false;
      evaluation.run_batch(index);
      if (feed.has_samples()) sums[shard].add(evaluation.context.sums);
      evaluation.context.sums = {};
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
