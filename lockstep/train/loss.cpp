#include "lockstep/train/loss.h"

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
int64_t count_correct_in_memory(const at::Tensor& output, const at::Tensor& target) {
  const int64_t rows = output.size(0), classes = output.size(1);
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

}  // namespace

int64_t count_correct(const at::Tensor& output, const at::Tensor& target) {
  const at::Tensor rows = prediction_rows(output), wanted = target.flatten();
  if (rows.is_cpu() && rows.is_contiguous() && rows.scalar_type() == at::kFloat &&
      wanted.is_contiguous() && is_dense(rows) && is_dense(wanted)) {
    return count_correct_in_memory(rows, wanted);
  }
  return rows.detach().argmax(1).eq(wanted).sum().item<int64_t>();
}

at::Tensor batch_loss(LossKind kind, const at::Tensor& output, const at::Tensor& target,
                      at::Reduction::Reduction reduction) {
  return kind == LossKind::cross_entropy
             ? at::cross_entropy_loss(prediction_rows(output), target.flatten(), {}, reduction)
             : at::mse_loss(output, target, reduction);
}

}  // namespace lockstep
