#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/data/transforms.h"

namespace lockstep {

/// Transforms made ready for one input, with the memory between their steps. One thread at a time.
class TransformRunner {
 public:
  TransformRunner(const Compose& transforms, const SampleSpec& input);
  const SampleSpec& output() const { return output_; }
  /// Writes `out` [rows.size(), ...], contiguous, of output()'s shape and dtype.
  void run(const RowView& rows, const at::Tensor& out, uint64_t seed, int64_t epoch,
           std::span<const int64_t> indices);

 private:
  struct Step {
    TransformPtr transform;
    SampleSpec input;
    SampleSpec output;
    uint64_t ordinal = 0;
    at::Tensor scratch;  ///< The step's output, for all steps but the last.
  };
  std::vector<Step> steps_;  ///< Without those that only reshape.
  SampleSpec output_;
  std::vector<int64_t> iota_;
};

}  // namespace lockstep
