#include "lockstep/train/metric_sums.h"

#include <ATen/ops/tensor.h>

#include <cmath>

namespace lockstep {

MetricSums reduce_over_ranks(const ProcessGroup& group, c10::Device device,
                             const MetricSums& mine) {
  if (group.size() == 1) return mine;
  at::Tensor wire = at::tensor(
      {mine.loss, static_cast<double>(mine.loss_terms), static_cast<double>(mine.correct),
       static_cast<double>(mine.classified), static_cast<double>(mine.samples)},
      at::device(device).dtype(at::kDouble));
  group.all_reduce(wire, ReduceOp::sum);
  const at::Tensor result = wire.cpu();
  const auto* values = result.const_data_ptr<double>();
  return {.loss = values[0],
          .loss_terms = std::llround(values[1]),
          .correct = std::llround(values[2]),
          .classified = std::llround(values[3]),
          .samples = std::llround(values[4])};
}

Metrics metrics_of(const MetricSums& sums) {
  Metrics metrics;
  metrics.samples = sums.samples;
  if (sums.loss_terms > 0) metrics.loss = sums.loss / static_cast<double>(sums.loss_terms);
  if (sums.classified > 0) {
    metrics.accuracy = static_cast<double>(sums.correct) / static_cast<double>(sums.classified);
  }
  return metrics;
}

}  // namespace lockstep
