#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/base/state_dict.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Parameters and buffers by the names of Python's state_dict. The tensors are the model's own.
StateDict state_dict(const torch::nn::Module& module);

/// Copies tensors into the model's parameters and buffers. `source` names them in messages. Throws
/// CheckpointError naming the first tensors that are missing, unexpected or of another shape, with
/// how many there are of each. `hint` is the error's; empty for the usual one.
void load_state_dict(torch::nn::Module& module, const StateDict& tensors, const std::string& source,
                     const std::string& hint = {});

/// Throws as load_state_dict does, and copies nothing.
void check_state_dict(const torch::nn::Module& module, const StateDict& tensors,
                      const std::string& source, const std::string& hint = {});

namespace detail {

/// Throws UsageError naming a tensor whose values a pipeline has freed, as another rank has them.
void require_values(const StateDict& tensors);

}  // namespace detail

}  // namespace lockstep
