#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include "lockstep/train/model_training.h"

namespace lockstep {

/// Of a batch, with a graph behind it: a tensor of no dimension. Where outputs have three
/// dimensions, each of a sample's T tokens counts as a prediction.
at::Tensor batch_loss(LossKind kind, const at::Tensor& output, const at::Tensor& target,
                      at::Reduction::Reduction reduction = at::Reduction::Mean);

/// Predictions whose largest output is the target's.
int64_t count_correct(const at::Tensor& output, const at::Tensor& target);

}  // namespace lockstep
