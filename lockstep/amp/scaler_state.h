#pragma once

#include <cstdint>

#include "lockstep/optim/optim.h"

namespace lockstep::detail {

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
