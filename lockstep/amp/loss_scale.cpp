#include "lockstep/amp/loss_scale.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"

namespace lockstep::detail {
namespace {

at::Tensor one_number(double value, c10::Device device, at::ScalarType dtype) {
  return at::full({}, value, at::device(device).dtype(dtype));
}

const at::Tensor& entry(const StateDict& state, const std::string& name) {
  const auto found = std::find_if(state.begin(), state.end(),
                                  [&](const auto& item) { return item.first == name; });
  if (found == state.end()) {
    throw CheckpointError("the gradient scaler's state lacks '" + name + "'",
                          state.empty() ? "it may come from a scaler that was not enabled"
                                        : "the checkpoint is damaged or of another precision");
  }
  if (!found->second.defined() || found->second.numel() != 1) {
    throw CheckpointError("the gradient scaler's state: '" + name + "' is not one number");
  }
  return found->second;
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
  std::vector<at::Tensor> values;
  for (const at::Tensor& gradient : gradients)
    values.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  for (const auto& places : by_kind(values)) {
    std::vector<at::Tensor> tensors;
    for (const size_t place : places) tensors.push_back(values[place]);
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

StateDict scaler_state(const ScalerState& state) {
  const auto real = [](double value) { return at::full({1}, value, at::kDouble); };
  const auto count = [](int64_t value) { return at::full({1}, value, at::kLong); };
  return {{"scale", real(state.scale)},
          {"growth_factor", real(state.growth_factor)},
          {"backoff_factor", real(state.backoff_factor)},
          {"growth_interval", count(state.growth_interval)},
          {"_growth_tracker", count(state.growth_tracker)}};
}

ScalerState read_scaler_state(const StateDict& state) {
  return {entry(state, "scale").item<double>(), entry(state, "growth_factor").item<double>(),
          entry(state, "backoff_factor").item<double>(),
          entry(state, "growth_interval").item<int64_t>(),
          entry(state, "_growth_tracker").item<int64_t>()};
}

}  // namespace lockstep::detail
