#include "lockstep/parallel/pipeline/micro_batches.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/split_with_sizes.h>

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

/// As equal as can be, the larger ones first.
std::vector<int64_t> sizes_of_parts(int64_t samples, int64_t parts) {
  std::vector<int64_t> sizes(static_cast<size_t>(parts), samples / parts);
  for (int64_t i = 0; i < samples % parts; ++i) ++sizes[static_cast<size_t>(i)];
  return sizes;
}

}  // namespace

MicroBatches::MicroBatches(const BatchWork& work, std::vector<int64_t> sizes)
    : work_(work),
      even_(sizes.front() == sizes.back()),
      inputs_(at::split_with_sizes(work.input, sizes)),
      targets_(at::split_with_sizes(work.target, sizes)) {}

at::Tensor MicroBatches::loss(int micro_batch, const at::Tensor& output) const {
  const auto i = static_cast<size_t>(micro_batch);
  const at::Tensor loss = work_.criterion(output, targets_[i]);
  if (inputs_.size() == 1) return loss;
  // A division, as programs write it that accumulate by themselves: so the bits are theirs.
  if (even_) return loss / static_cast<double>(inputs_.size());
  return loss *
         (static_cast<double>(inputs_[i].size(0)) / static_cast<double>(work_.input.size(0)));
}

MicroBatches cut_batch(const BatchWork& work, const PipelineSchedule& schedule) {
  check_work(work);
  const int64_t samples = work.input.size(0);
  PipelineShape shape{schedule.num_ranks, 0, schedule.stages_per_rank()};
  int64_t parts = std::min<int64_t>(schedule.num_micro_batches, samples);
  while (shape.num_micro_batches = static_cast<int>(parts),
         !fits_pipeline_schedule(schedule.name, shape)) {
    --parts;
  }
  return MicroBatches(work, sizes_of_parts(samples, parts));
}

PipelineSchedule schedule_for(const MicroBatches& batches, const PipelineSchedule& schedule) {
  if (batches.size() == schedule.num_micro_batches) return schedule;
  return make_pipeline_schedule(schedule.name,
                                {schedule.num_ranks, batches.size(), schedule.stages_per_rank()});
}

}  // namespace lockstep::detail
