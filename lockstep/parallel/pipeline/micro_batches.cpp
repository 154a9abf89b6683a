#include "lockstep/parallel/pipeline/micro_batches.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor_split.h>

#include <algorithm>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

void check_work(const BatchWork& work) {
  if (!work.input.defined() || !work.target.defined() || !work.criterion) {
    throw UsageError(
        "strategy pipeline: a batch is cut into micro-batches, which BatchWork::loss alone does "
        "not allow",
        "give BatchWork::input, target and criterion");
  }
  if (work.input.dim() == 0 || work.target.dim() == 0 ||
      work.input.size(0) != work.target.size(0) || work.input.size(0) == 0) {
    throw UsageError("strategy pipeline: input " + c10::str(work.input.sizes()) + " and target " +
                     c10::str(work.target.sizes()) +
                     " must have the same number of samples in dimension 0, at least one");
  }
}

}  // namespace

MicroBatches::MicroBatches(const BatchWork& work, const PipelineSchedule& schedule) : work_(work) {
  check_work(work);
  PipelineShape shape{schedule.num_ranks, 0, schedule.stages_per_rank()};
  int64_t parts = std::min<int64_t>(schedule.num_micro_batches, work.input.size(0));
  while (shape.num_micro_batches = static_cast<int>(parts),
         !fits_pipeline_schedule(schedule.name, shape)) {
    --parts;
  }
  // As equal as can be, the larger ones first.
  inputs_ = at::tensor_split(work.input, parts);
  targets_ = at::tensor_split(work.target, parts);
}

at::Tensor MicroBatches::loss(int micro_batch, const at::Tensor& output) const {
  const auto i = static_cast<size_t>(micro_batch);
  const at::Tensor loss = work_.criterion(output, targets_[i]);
  if (inputs_.size() == 1) return loss;
  // A division, as programs write it that accumulate by themselves: so the bits are theirs.
  const bool even = inputs_.front().size(0) == inputs_.back().size(0);
  if (even) return loss / static_cast<double>(inputs_.size());
  return loss *
         (static_cast<double>(inputs_[i].size(0)) / static_cast<double>(work_.input.size(0)));
}

PipelineSchedule schedule_for(const MicroBatches& batches, const PipelineSchedule& schedule) {
  if (batches.size() == schedule.num_micro_batches) return schedule;
  return make_pipeline_schedule(schedule.name,
                                {schedule.num_ranks, batches.size(), schedule.stages_per_rank()});
}

}  // namespace lockstep::detail
