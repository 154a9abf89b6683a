#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/training_results.h"

namespace lockstep {

/// Sums from which a mean loss and an accuracy come. They are exact over any number of batches and
/// ranks, because counts are whole and each sample is added once.
struct MetricSums {
  double loss = 0;         ///< Sum of the loss over `loss_terms`.
  int64_t loss_terms = 0;  ///< Samples; for mean squared error elements of the output.
  int64_t correct = 0;     ///< Samples whose largest output is the target's; 0 for regression.
  int64_t classified = 0;  ///< Samples that have a class; 0 for regression.
  int64_t samples = 0;

  void add(const MetricSums& other) {
    loss += other.loss;
    loss_terms += other.loss_terms;
    correct += other.correct;
    classified += other.classified;
    samples += other.samples;
  }
};

/// The sums of all ranks, on all ranks: one all-reduce in double, in which counts up to 2^53 are
/// exact. `device` is where the group's backend communicates.
MetricSums reduce_over_ranks(const ProcessGroup& group, c10::Device device, const MetricSums& mine);

/// NaN where there is nothing to divide by.
Metrics metrics_of(const MetricSums& sums);

}  // namespace lockstep
