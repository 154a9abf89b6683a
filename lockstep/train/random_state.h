#pragma once

#include <c10/core/Device.h>

#include "lockstep/data/safetensors.h"

namespace lockstep {

/// The states of LibTorch's default generators, of the CPU and of `device`: "rng.cpu", "rng.cuda".
/// uint8 tensors on the CPU.
StateDict random_state(c10::Device device);

/// Sets the generators. Throws CheckpointError when the CPU's is missing. A device's goes on as it
/// is where the state is of a run on the CPU.
void set_random_state(const StateDict& state, c10::Device device);

}  // namespace lockstep
