#pragma once

#include <filesystem>

#include "lockstep/data/safetensors.h"
#include "lockstep/models/models.h"

namespace lockstep {

/// Parameters and buffers by the names of Python's state_dict; the tensors are the model's own.
NamedTensors state_dict(const torch::nn::Module& module);

/// Copies tensors into the model's parameters and buffers. `source` names them in messages. Throws
/// CheckpointError naming every tensor that is missing, left over or of another shape.
void load_state_dict(torch::nn::Module& module, const NamedTensors& tensors,
                     const std::string& source);

/// Reads a safetensors file into a model. A prefix "module.", as DDP in Python leaves behind, is
/// taken away. Throws DataError and CheckpointError.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path);

/// Writes a model's state_dict as safetensors.
void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
