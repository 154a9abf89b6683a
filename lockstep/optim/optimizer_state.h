#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"

namespace lockstep {

/// Of one parameter.
using StateFields = std::map<std::string, at::Tensor>;

/// The name of a count of steps, one whole number. All other fields have their parameter's shape.
inline constexpr const char* kStep = "step";

/// "NAME.INDEX".
std::string state_key(const std::string& name, size_t index);
struct StateKey {
  std::string name;
  size_t index;
};
/// Takes it apart. Throws CheckpointError for any other text.
StateKey parse_state_key(const std::string& text);

/// A state by the parameters' indices. Checks each entry against the fields that an optimizer keeps
/// and its parameters' shapes. Throws CheckpointError naming the optimizer and the entry.
std::map<size_t, StateFields> read_state(const std::string& optimizer, const StateDict& state,
                                         const std::vector<std::string>& fields,
                                         const std::vector<at::Tensor>& parameters);
/// Whether any parameter has the field.
bool has_field(const std::map<size_t, StateFields>& state, const std::string& field);
/// Throws CheckpointError where the parameter has no such field.
const at::Tensor& required(const std::string& optimizer, const StateFields& fields,
                           const std::string& field, size_t index);

/// A copy with the parameter's dtype, device and strides.
at::Tensor copy_like(const at::Tensor& tensor, const at::Tensor& parameter);

}  // namespace lockstep
