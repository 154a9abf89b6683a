#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/trainer_options.h"

namespace lockstep {

/// Notices a loss or gradient that is NaN or infinite, and lets all ranks decide alike without
/// communication in the steps that are well.
///
/// A rank whose loss is not finite is to run backward from NaN. Then DDP's all-reduce makes the
/// gradients NaN on every rank, and each rank sees that in its own copy: all of them are looked at,
/// in every step. Only after that do ranks talk, to name the one where it began.
class FiniteCheck {
 public:
  FiniteCheck(OnNan policy, const ProcessGroup& group) : policy_(policy), group_(group) {}

  /// Before a batch's backward, with its loss before any division for accumulation. False when
  /// backward is to run from NaN.
  bool loss_is_good(double loss);

  /// After the backward of a step's last batch, with the parameters that have its gradients. True
  /// when the step is to be made, false when it is to be skipped on all ranks. Throws NumericError
  /// with `stop`, on all ranks. The first few skips of a run are warned of one by one.
  bool step_is_good(const std::vector<at::Tensor>& parameters, int64_t step, int64_t epoch);

  /// At the end of an epoch, of which this run has made so many steps. Tells how many were skipped.
  /// Throws NumericError, on all ranks, when all were. Not if the run is resumed within the epoch:
  /// it does not know the steps before.
  void end_epoch(int64_t epoch, int64_t steps, bool from_its_start);

  int64_t skipped() const { return skipped_; }

 private:
  static bool gradients_are_finite(const std::vector<at::Tensor>& parameters);
  std::string explain(int64_t step, int64_t epoch) const;

  OnNan policy_;
  ProcessGroup group_;
  std::optional<double> bad_loss_;  ///< Of a batch of the step in progress, on this rank.
  int64_t skipped_ = 0;             ///< In the run.
  int64_t skipped_in_epoch_ = 0;
};

}  // namespace lockstep
