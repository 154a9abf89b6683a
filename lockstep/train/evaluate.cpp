#include "lockstep/train/evaluate.h"

#include <ATen/core/grad_mode.h>

#include "lockstep/train/loss.h"
#include "lockstep/train/memory_format.h"

namespace lockstep {
namespace {

void broadcast_buffers(Model& model, const ProcessGroup& group) {
  if (group.size() == 1) return;
  for (at::Tensor& buffer : model.buffers()) group.broadcast(buffer, 0);
}

class EvaluationMode {
 public:
  explicit EvaluationMode(Model& model) : model_(model), training_(model.is_training()) {
    model_.eval();
  }
  ~EvaluationMode() { model_.train(training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  Model& model_;
  bool training_;
};

}  // namespace

Metrics evaluate(Model& model, LossKind loss, DataLoader& loader, const ProcessGroup& group,
                 c10::Device device, int64_t limit_batches, at::MemoryFormat memory_format,
                 const std::function<bool()>& go_on) {
  const at::NoGradGuard no_grad;
  const EvaluationMode mode(model);
  broadcast_buffers(model, group);
  MetricSums sums;
  loader.epoch(0);
  Batch batch;
  for (int64_t used = 0; (limit_batches == 0 || used < limit_batches) && loader.next(batch);
       ++used) {
    const at::Tensor target = batch.target.to(device);
    const at::Tensor output =
        model.forward(with_memory_format(batch.data.to(device), memory_format));
    if (const int64_t rows = batch.size() - batch.padding; rows > 0) {
      MetricSums mine;
      add_batch(mine, loss, 0, output, target, rows);
      mine.loss = loss_sum(loss, output, target, rows);
      sums.add(mine);
    }
    if (go_on && !go_on()) return {};
  }
  return metrics_of(reduce_over_ranks(group, device, sums));
}

}  // namespace lockstep
