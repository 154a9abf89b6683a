#include "lockstep/train/metric_reduction.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace lockstep {
namespace {

constexpr double kSecondsBetweenAgreements = 0.2;

template <size_t N>
void all_reduce(const ProcessGroup& group, c10::Device device, std::array<double, N>& values,
                ReduceOp op) {
  at::Tensor wire = at::from_blob(values.data(), {static_cast<int64_t>(N)}, at::kDouble).to(device);
  group.all_reduce(wire, op);
  const at::Tensor result = wire.cpu();
  std::copy_n(result.const_data_ptr<double>(), N, values.begin());
}

}  // namespace

MetricSums reduce_over_ranks(const ProcessGroup& group, c10::Device device,
                             const MetricSums& mine) {
  if (group.size() == 1) return mine;
  std::array<double, 5> values{
      mine.loss, static_cast<double>(mine.loss_terms), static_cast<double>(mine.correct),
      static_cast<double>(mine.classified), static_cast<double>(mine.samples)};
  all_reduce(group, device, values, ReduceOp::sum);
  MetricSums all;
  all.loss = values[0];
  all.loss_terms = std::llround(values[1]);
  all.correct = std::llround(values[2]);
  all.classified = std::llround(values[3]);
  all.samples = std::llround(values[4]);
  return all;
}

Metrics metrics_of(const MetricSums& sums) {
  return {sums.mean_loss(), sums.accuracy(), sums.samples};
}

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
  std::array<double, 2> values{static_cast<double>(signal_number), step_seconds};
  all_reduce(group_, device_, values, ReduceOp::max);
  // The slowest rank's step time, so that the interval is the same everywhere.
  interval_ = static_cast<int64_t>(
      std::clamp(kSecondsBetweenAgreements / std::max(values[1], 1e-6), 1.0, 1e6));
  steps_ = 0;
  last_ = Clock::now();
  return static_cast<int>(values[0]);
}

}  // namespace lockstep
