#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace lockstep {

/// Samples held in memory. Row i of `data` belongs to row i of `targets`. Both are contiguous CPU
/// tensors; they are shared, never written to.
struct TensorDataset {
  std::string name;         ///< "mnist", "digits", ...: used in messages.
  at::Tensor data;          ///< [N, ...]; images are uint8 [N, H, W] or [N, C, H, W].
  at::Tensor targets;       ///< int64 [N] class indices, or float32 [N, K] for regression.
  int64_t num_classes = 0;  ///< 0 for regression.

  int64_t size() const { return data.size(0); }
};

/// What training needs of a dataset: a part to learn from and a held-out part.
struct DatasetSplits {
  TensorDataset train;
  TensorDataset test;
};

}  // namespace lockstep
