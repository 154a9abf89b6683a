#include "lockstep/amp/scaler_state.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

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
