#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/parallel/pipeline/schedule.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep::detail {

/// A batch in parts along dimension 0. Valid while the BatchWork that it was cut from is.
class MicroBatches {
 public:
  /// As many parts as `schedule` has micro-batches, or fewer where the batch has fewer samples.
  /// Throws UsageError for a work without input, target or criterion.
  MicroBatches(const BatchWork& work, const PipelineSchedule& schedule);
  int size() const { return static_cast<int>(inputs_.size()); }
  const std::vector<at::Tensor>& inputs() const { return inputs_; }
  /// The part's share of the batch's mean.
  at::Tensor loss(int micro_batch, const at::Tensor& output) const;

 private:
  const BatchWork& work_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> targets_;
};

/// The same schedule for as many micro-batches as there are.
PipelineSchedule schedule_for(const MicroBatches& batches, const PipelineSchedule& schedule);

}  // namespace lockstep::detail
