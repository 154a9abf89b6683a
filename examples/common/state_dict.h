// A module's tensors by the names that Python's state_dict() gives them, for safetensors files.
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/data/safetensors.h"

namespace examples {

inline lockstep::NamedTensors state_dict(const torch::nn::Module& module) {
  lockstep::NamedTensors tensors;
  for (const auto& item : module.named_parameters()) {
    tensors.emplace_back(item.key(), item.value().detach());
  }
  for (const auto& item : module.named_buffers()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

/// Copies the values into the module's tensors. Throws DataError when a name or a shape differs.
inline void load_state_dict(torch::nn::Module& module, const lockstep::NamedTensors& saved) {
  const auto own = state_dict(module);
  if (own.size() != saved.size()) {
    throw lockstep::DataError("the file holds " + std::to_string(saved.size()) +
                              " tensors, the model has " + std::to_string(own.size()));
  }
  for (auto [name, tensor] : own) {
    bool found = false;
    for (const auto& [saved_name, value] : saved) {
      if (saved_name != name || value.sizes() != tensor.sizes()) continue;
      tensor.copy_(value);
      found = true;
    }
    if (!found) throw lockstep::DataError("the file has no tensor '" + name + "' of its shape");
  }
}

}  // namespace examples
