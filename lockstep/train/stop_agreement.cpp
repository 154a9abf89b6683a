#include "lockstep/train/stop_agreement.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

namespace lockstep {
namespace {

constexpr double kSecondsBetweenAgreements = 0.2;

}  // namespace

StopAgreement::StopAgreement(const ProcessGroup& group, c10::Device device)
    : group_(group), device_(device), last_(Clock::now()) {}

int StopAgreement::after_step(int signal_number) {
  if (group_.size() == 1) return signal_number;
  return ++steps_ >= interval_ ? now(signal_number) : 0;
}

int StopAgreement::now(int signal_number) {
  if (group_.size() == 1) return signal_number;
  const auto time = Clock::now();
  const double step_seconds = std::chrono::duration<double>(time - last_).count() /
                              static_cast<double>(std::max<int64_t>(steps_, 1));
  at::Tensor wire = at::tensor({static_cast<double>(signal_number), step_seconds},
                               at::device(device_).dtype(at::kDouble));
  group_.all_reduce(wire, ReduceOp::max);
  const at::Tensor agreed = wire.cpu();
  const auto* values = agreed.const_data_ptr<double>();
  // The slowest rank's step time, so that the interval is the same everywhere.
  interval_ = static_cast<int64_t>(
      std::clamp(kSecondsBetweenAgreements / std::max(values[1], 1e-6), 1.0, 1e6));
  steps_ = 0;
  last_ = Clock::now();
  return static_cast<int>(values[0]);
}

}  // namespace lockstep
