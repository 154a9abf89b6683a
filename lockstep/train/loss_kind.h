#pragma once

namespace lockstep {

enum class LossKind {
  /// Outputs [B, classes], targets int64 [B]. Or a class a token: [B, T, classes] and [B, T].
  cross_entropy,
  mean_squared,  ///< Outputs and targets [B, K], float32.
};

}  // namespace lockstep
