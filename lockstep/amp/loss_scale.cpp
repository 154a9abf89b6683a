#include "lockstep/amp/loss_scale.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/optim/flat_runs.h"

namespace lockstep::detail {
namespace {

at::Tensor one_number(double value, c10::Device device, at::ScalarType dtype) {
  return at::full({}, value, at::device(device).dtype(dtype));
}

/// One list a device and dtype, as LibTorch's list kernels want them. A sparse tensor's values.
std::vector<std::vector<at::Tensor>> by_kind(const std::vector<at::Tensor>& gradients) {
  std::vector<std::vector<at::Tensor>> kinds;
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor tensor = gradient.is_sparse() ? gradient._values() : gradient;
    const auto fits = [&](const std::vector<at::Tensor>& kind) {
      return kind.front().device() == tensor.device() && kind.front().dtype() == tensor.dtype();
    };
    auto kind = std::find_if(kinds.begin(), kinds.end(), fits);
    if (kind == kinds.end()) kind = kinds.emplace(kinds.end());
    kind->push_back(tensor);
  }
  return kinds;
}

}  // namespace

LossScale::LossScale(double value, int64_t growth_tracker, c10::Device device)
    : scale_(one_number(value, device, at::kFloat)),
      growth_tracker_(one_number(static_cast<double>(growth_tracker), device, at::kInt)) {}

at::Tensor LossScale::scaled(const at::Tensor& output) const {
  return output * scale_.to(output.device(), /*non_blocking=*/true);
}

at::Tensor LossScale::unscale(const std::vector<at::Tensor>& gradients, bool check_only,
                              const ProcessGroup& group) const {
  const c10::AutoGradMode no_grad(false);
  // In float64, as in Python: a reciprocal in float32 may round otherwise.
  const at::Tensor inverse = check_only ? one_number(1, scale_.device(), at::kFloat)
                                        : scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  at::Tensor found = one_number(0, scale_.device(), at::kFloat);
  for (const auto& tensors : by_kind(gradients)) {
    const c10::Device device = tensors.front().device();
    at::Tensor found_here = one_number(0, device, at::kFloat);
    at::_amp_foreach_non_finite_check_and_unscale_(flat_runs(tensors), found_here,
                                                   inverse.to(device));
    found = at::maximum(found, found_here.to(found.device()));
  }
  if (group && group.size() > 1) {
    at::Tensor row = found.reshape({1});
    group.all_reduce(row, ReduceOp::max);
    found = row.reshape({});
  }
  return found;
}

void LossScale::update(const at::Tensor& found_inf, const LossScaleRule& rule) {
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf, rule.growth_factor,
                         rule.backoff_factor, rule.growth_interval);
}

void LossScale::set(double value, int64_t growth_tracker) {
  scale_.fill_(value);
  growth_tracker_.fill_(growth_tracker);
}

void LossScale::set(double value) {
  scale_.fill_(value);
}

double LossScale::value() const {
  return scale_.item<double>();
}

int64_t LossScale::growth_tracker() const {
  return growth_tracker_.item<int64_t>();
}

}  // namespace lockstep::detail
