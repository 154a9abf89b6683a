#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

/// Notices a loss or gradient that is NaN or infinite, and lets all ranks decide alike.
///
/// A rank whose loss is not finite is to run backward from NaN. Where all ranks have the same
/// gradients, the all-reduce makes these NaN on every rank, and each rank sees that in its own
/// copy: so steps that are well need no communication. Where ranks have different gradients, one
/// number is reduced in every step. Only after something was found do ranks talk, to name the one
/// where it began.
class FiniteCheck {
 public:
  /// `device` is where the group's backend communicates.
  FiniteCheck(OnNan policy, const ProcessGroup& group, c10::Device device = c10::kCPU)
      : policy_(policy), group_(group), device_(device) {}

  /// Before a step's first batch. Forgets what was seen of a batch that no step followed, such as
  /// that of a warm-up.
  void begin_step() { bad_loss_.reset(); }

  /// Before a batch's backward, with its loss before any division for accumulation. False when
  /// backward is to run from NaN.
  bool loss_is_good(double loss);

  /// What is known after the backward of a step's last batch.
  struct Found {
    const std::vector<at::Tensor>& gradients;  ///< Those that this rank has.
    bool sharded = false;                      ///< The other ranks' differ.
    /// What a gradient scaler found, alike on all ranks. Then an infinite gradient is routine, and
    /// the scaler's to skip, unless a loss was not finite. None without a scaler.
    std::optional<bool> overflowed = {};
  };
  /// True when the step is to be made, false when it is to be skipped on all ranks. Throws
  /// NumericError with `stop`, on all ranks. The first few skips of a run are warned of one by one.
  bool step_is_good(const Found& found, int64_t step, int64_t epoch);

  /// At the end of an epoch, of which this run has made so many steps. Tells how many were skipped.
  /// Throws NumericError, on all ranks, when all were. Not if the run is resumed within the epoch:
  /// it does not know the steps before.
  void end_epoch(int64_t epoch, int64_t steps, bool from_its_start);

 private:
  bool is_good_everywhere(bool good_here) const;
  /// Of all ranks; null where it was finite.
  std::vector<nlohmann::json> bad_losses() const;
  std::string explain(int64_t step, int64_t epoch) const;

  OnNan policy_;
  ProcessGroup group_;
  c10::Device device_;
  std::optional<double> bad_loss_;  ///< Of a batch of the step in progress, on this rank.
  int64_t skipped_ = 0;             ///< In the run.
  int64_t skipped_in_epoch_ = 0;
};

}  // namespace lockstep
