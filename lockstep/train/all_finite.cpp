#include "lockstep/train/all_finite.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "lockstep/train/finite_kernel.h"

namespace lockstep {
namespace {

/// As many as a thread reads in some 10 microseconds.
constexpr int64_t kElementsOfAThread = 64 * 1024;

bool is_plain(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided) return false;
  const at::ScalarType type = tensor.scalar_type();
  return tensor.is_non_overlapping_and_dense() &&
         (type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16);
}

bool part_is_finite(const void* data, at::ScalarType type, int64_t begin, int64_t end) {
  switch (type) {
    case at::kFloat:
      return are_finite(static_cast<const float*>(data) + begin, end - begin);
    case at::kDouble:
      return are_finite(static_cast<const double*>(data) + begin, end - begin);
    case at::kHalf:
      return are_finite_half(static_cast<const uint16_t*>(data) + begin, end - begin);
    default:
      return are_finite_bfloat16(static_cast<const uint16_t*>(data) + begin, end - begin);
  }
}

bool plain_is_finite(const at::Tensor& tensor) {
  const int64_t count = tensor.numel();
  const void* const data = tensor.const_data_ptr();
  const at::ScalarType type = tensor.scalar_type();
  if (count <= kElementsOfAThread) return part_is_finite(data, type, 0, count);
  std::atomic<bool> finite{true};
  at::parallel_for(0, count, kElementsOfAThread, [&](int64_t begin, int64_t end) {
    if (!part_is_finite(data, type, begin, end)) finite = false;
  });
  return finite;
}

}  // namespace

bool all_finite(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> others;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor._is_zerotensor()) continue;
    if (tensor.numel() == 0 || (tensor.is_sparse() && tensor._values().numel() == 0)) continue;
    if (!is_plain(tensor)) {
      others.push_back(tensor.is_sparse() ? tensor._values() : tensor);
    } else if (!plain_is_finite(tensor)) {
      return false;
    }
  }
  if (others.empty()) return true;
  const c10::AutoGradMode no_grad(false);
  // The largest of a tensor cannot overflow, as a sum can, and keeps NaN. One wait for a device.
  std::vector<at::Tensor> largest =
      at::_foreach_norm(others, std::numeric_limits<double>::infinity());
  for (at::Tensor& one : largest) one = one.to(others.front().device());
  return std::isfinite(at::stack(largest).max().item<double>());
}

}  // namespace lockstep
