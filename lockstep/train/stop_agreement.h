#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Lets all ranks stop at the same step although a signal reaches them at different ones. Agreeing
/// costs an all-reduce. So ranks do it about five times per second: after so many steps as all of
/// them make in that time. A group of one looks at every step.
class StopAgreement {
 public:
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
  Clock::time_point last_;
};

}  // namespace lockstep
