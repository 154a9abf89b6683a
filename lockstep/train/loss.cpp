#include "lockstep/train/loss.h"

#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/mse_loss.h>

#include "lockstep/optim/dense_layout.h"

namespace lockstep {
namespace {

/// One row a prediction: [B, T, classes] of a model that predicts for each of T tokens becomes
/// [B * T, classes], as Python's view(-1, classes).
at::Tensor prediction_rows(const at::Tensor& output) {
  return output.dim() == 3 ? output.flatten(0, 1) : output;
}

/// For a small batch in memory this takes a tenth of the time of argmax, eq, sum and item.
int64_t count_correct_in_memory(const at::Tensor& output, const at::Tensor& target, int64_t rows) {
  const int64_t classes = output.size(1);
  const float* row = output.const_data_ptr<float>();
  const int64_t* wanted = target.const_data_ptr<int64_t>();
  int64_t correct = 0;
  for (int64_t i = 0; i < rows; ++i, row += classes) {
    int64_t best = 0;
    for (int64_t c = 1; c < classes; ++c) {
      if (row[c] > row[best]) best = c;
    }
    correct += best == wanted[i];
  }
  return correct;
}

int64_t count_correct(const at::Tensor& output, const at::Tensor& target, int64_t rows) {
  if (output.is_cpu() && output.is_contiguous() && output.scalar_type() == at::kFloat &&
      target.is_contiguous() && is_dense(output) && is_dense(target)) {
    return count_correct_in_memory(output, target, rows);
  }
  return output.detach()
      .narrow(0, 0, rows)
      .argmax(1)
      .eq(target.narrow(0, 0, rows))
      .sum()
      .item<int64_t>();
}

}  // namespace

at::Tensor batch_loss(LossKind kind, const at::Tensor& output, const at::Tensor& target) {
  return kind == LossKind::cross_entropy
             ? at::cross_entropy_loss(prediction_rows(output), target.flatten())
             : at::mse_loss(output, target);
}

double loss_sum(LossKind kind, const at::Tensor& output, const at::Tensor& target, int64_t rows) {
  if (rows == 0) return 0;
  const at::Tensor out = output.detach().narrow(0, 0, rows);
  const at::Tensor wanted = target.narrow(0, 0, rows);
  return kind == LossKind::cross_entropy
             ? at::cross_entropy_loss(prediction_rows(out), wanted.flatten(), {},
                                      at::Reduction::Sum)
                   .item<double>()
             : at::mse_loss(out, wanted, at::Reduction::Sum).item<double>();
}

void add_batch(MetricSums& sums, LossKind kind, double mean_loss, const at::Tensor& output,
               const at::Tensor& target, int64_t rows) {
  const bool classes = kind == LossKind::cross_entropy;
  const int64_t terms = rows * ((classes ? target : output).numel() / output.size(0));
  sums.loss += mean_loss * static_cast<double>(terms);
  sums.loss_terms += terms;
  sums.samples += rows;
  if (!classes) return;
  sums.correct +=
      static_cast<double>(count_correct(prediction_rows(output), target.flatten(), terms));
  sums.classified += terms;
}

}  // namespace lockstep
