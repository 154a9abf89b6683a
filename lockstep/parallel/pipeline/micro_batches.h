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
  MicroBatches(const BatchWork& work, std::vector<int64_t> sizes);
  int size() const { return static_cast<int>(inputs_.size()); }
  const std::vector<at::Tensor>& inputs() const { return inputs_; }
  /// The part's share of the batch's mean.
  at::Tensor loss(int micro_batch, const at::Tensor& output) const;

 private:
  const BatchWork& work_;
  bool even_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> targets_;
};

/// Cuts the batches of a run, of which the first one is the largest.
class BatchCutter {
 public:
  /// As many parts as `schedule` has micro-batches; of a batch smaller than the first one as many
  /// as can be. Throws UsageError for a work without input, target or criterion, and for a batch
  /// of full size that cannot be divided.
  MicroBatches cut(const BatchWork& work, const PipelineSchedule& schedule);

  /// The next batch may be the last one of an epoch, as the first one after a resume may be.
  void expect_any_size() { any_size_ = true; }

 private:
  int64_t full_size_ = 0;
  bool any_size_ = false;
};

}  // namespace lockstep::detail
