#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "lockstep/base/state_dict.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// How the factor of a loss follows from what became of the gradients.
struct LossScaleRule {
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
};

/// The factor of a loss, on its device, and LibTorch's kernels that use it. What GradScaler and
/// Precision share. `scaled` may be called by several threads at once.
class LossScale {
 public:
  LossScale(double value, int64_t growth_tracker, c10::Device device);

  at::Tensor scaled(const at::Tensor& output) const;
  /// One number, 1 where a gradient is infinite or NaN and 0 otherwise, on the scale's device. The
  /// gradients are divided by the scale; with `check_only` they keep their values. With a group of
  /// several ranks all get 1 where any has found one: a collective.
  at::Tensor unscale(const std::vector<at::Tensor>& gradients, bool check_only,
                     const ProcessGroup& group) const;
  /// Grows or shrinks the scale by the rule.
  void update(const at::Tensor& found_inf, const LossScaleRule& rule);
  void set(double value, int64_t growth_tracker);
  void set(double value);

  /// One number, float32.
  const at::Tensor& tensor() const { return scale_; }
  /// These wait for a CUDA device.
  double value() const;
  int64_t growth_tracker() const;

 private:
  at::Tensor scale_;
  at::Tensor growth_tracker_;  ///< int32: steps since the last change.
};

/// The entries of torch.amp.GradScaler's state_dict.
struct ScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  int64_t growth_interval = 0;
  int64_t growth_tracker = 0;
};

/// As named tensors of one element, under Python's names.
StateDict scaler_state(const ScalerState& state);
/// Throws CheckpointError naming an entry that is missing or not one number.
ScalerState read_scaler_state(const StateDict& state);

}  // namespace lockstep::detail
