#pragma once

#include <c10/core/Device.h>

#include "lockstep/data/safetensors.h"

namespace lockstep {

/// The states of LibTorch's default generators, of the CPU and of `device`: "rng.cpu", "rng.cuda".
/// uint8 tensors on the CPU.
StateDict random_state(c10::Device device);

/// Sets the generators. Throws CheckpointError when one is missing.
void set_random_state(const StateDict& state, c10::Device device);

}  // namespace lockstep
