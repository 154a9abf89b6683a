#include "lockstep/train/all_finite.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

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

/// `exponent`: its bits. NaN and infinity have all of them set: one more carries into the sign.
template <class Bits, Bits exponent>
bool all_below(const char* data, int64_t begin, int64_t end) {
  constexpr Bits kOne = exponent & (~exponent + 1);
  Bits any = 0;
  for (int64_t i = begin; i < end; ++i) {
    Bits value;
    std::memcpy(&value, data + i * static_cast<int64_t>(sizeof value), sizeof value);
    any |= static_cast<Bits>((value & exponent) + kOne);
  }
  return (any & static_cast<Bits>(exponent + kOne)) == 0;
}

bool part_is_finite(const at::Tensor& tensor, int64_t begin, int64_t end) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return all_below<uint32_t, 0x7f80'0000>(data, begin, end);
    case at::kDouble:
      return all_below<uint64_t, 0x7ff0'0000'0000'0000>(data, begin, end);
    case at::kHalf:
      return all_below<uint16_t, 0x7c00>(data, begin, end);
    default:
      return all_below<uint16_t, 0x7f80>(data, begin, end);
  }
}

bool plain_is_finite(const at::Tensor& tensor) {
  const int64_t count = tensor.numel();
  if (count <= kElementsOfAThread) return part_is_finite(tensor, 0, count);
  std::atomic<bool> finite{true};
  at::parallel_for(0, count, kElementsOfAThread, [&](int64_t begin, int64_t end) {
    if (!part_is_finite(tensor, begin, end)) finite = false;
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
