#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"

namespace lockstep {

/// What an entry of an optimizer's state holds.
enum class StateKind {
  like_parameter,  ///< A tensor of the parameter's shape.
  count,           ///< One whole number.
};

struct StateField {
  std::string name;
  StateKind kind;
};

struct StateEntry {
  std::string name;
  size_t index;  ///< Of the parameter.
  at::Tensor tensor;
};

/// The name of a count of steps.
inline constexpr const char* kStep = "step";

/// "NAME.INDEX".
std::string state_key(const std::string& name, size_t index);

/// Takes a state's keys apart and checks each entry against the fields that an optimizer keeps and
/// its parameters' shapes. Throws CheckpointError naming the optimizer and the entry.
std::vector<StateEntry> read_state(const std::string& optimizer, const StateDict& state,
                                   const std::vector<StateField>& fields,
                                   const std::vector<at::Tensor>& parameters);

/// A copy with the parameter's dtype, device and strides.
at::Tensor copy_like(const at::Tensor& tensor, const at::Tensor& parameter);

}  // namespace lockstep
