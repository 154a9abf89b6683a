#pragma once

#include <ATen/core/Tensor.h>

#include "lockstep/train/metric_sums.h"
#include "lockstep/train/model_training.h"

namespace lockstep {

/// The mean over the batch, with a graph behind it: a tensor of no dimension. Where outputs have
/// three dimensions, each of a sample's T tokens counts as a prediction, in the accuracy too.
at::Tensor batch_loss(LossKind kind, const at::Tensor& output, const at::Tensor& target);

/// The sum of the loss over the first `rows` rows, without a graph.
double loss_sum(LossKind kind, const at::Tensor& output, const at::Tensor& target, int64_t rows);

/// Adds the counts of the first `rows` rows of a batch to `sums`, and `mean_loss` over them as so
/// many terms of the loss.
void add_batch(MetricSums& sums, LossKind kind, double mean_loss, const at::Tensor& output,
               const at::Tensor& target, int64_t rows);

}  // namespace lockstep
