#pragma once

namespace lockstep {

enum class LossKind {
  cross_entropy,  ///< Outputs [B, classes], targets int64 [B].
  mean_squared,   ///< Outputs and targets [B, K], float32.
};

}  // namespace lockstep
