#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Lets all ranks stop at the same step although a signal reaches them at different ones. Agreeing
/// costs an all-reduce, so small steps do it every few steps only. That is often enough to agree
/// within a fifth of a second, and at the latest after `kMostSteps`, should the steps become slow.
/// A group of one looks at every step.
class StopAgreement {
 public:
  /// Steps that a signal waits at most.
  static constexpr int64_t kMostSteps = 16;

  StopAgreement(const ProcessGroup& group, c10::Device device);
  /// Every rank calls after each step, with its own signal (0: none). The signal on which all ranks
  /// agreed, the same at the same step on every rank; 0: go on.
  int after_step(int signal_number);
  /// Every rank calls. Agrees at once.
  int now(int signal_number);

 private:
  using Clock = std::chrono::steady_clock;
  ProcessGroup group_;
  c10::Device device_;
  int64_t steps_ = 0;
  int64_t interval_ = 1;
  double cost_ = 0;  ///< Seconds of the last agreement on this rank.
  Clock::time_point last_;
};

}  // namespace lockstep
