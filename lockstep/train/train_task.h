#pragma once

#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

#include <memory>

#include "lockstep/data/loader.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"

namespace lockstep {

enum class LossKind {
  cross_entropy,  ///< Outputs [B, classes], targets int64 [B].
  mean_squared,   ///< Outputs and targets [B, K], float32.
};

/// What a training run works with. The model's parameters are already on `device` and belong to
/// `optimizer`. The loaders must be made alike on all ranks.
struct TrainTask {
  std::shared_ptr<Model> model;
  LossKind loss = LossKind::cross_entropy;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<DataLoader> train;
  std::unique_ptr<DataLoader> test;
  c10::Device device = c10::kCPU;
  /// Of the model's tensors and of batches of 4 dimensions; see memory_format.h.
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
};

}  // namespace lockstep
