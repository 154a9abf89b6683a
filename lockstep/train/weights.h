#pragma once

#include <filesystem>

#include "lockstep/data/safetensors.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Parameters and buffers by the names of Python's state_dict. The tensors are the model's own.
NamedTensors state_dict(const torch::nn::Module& module);

/// Copies tensors into the model's parameters and buffers. `source` names them in messages. Throws
/// CheckpointError naming the first tensors that are missing, unexpected or of another shape, with
/// how many there are of each.
void load_state_dict(torch::nn::Module& module, const NamedTensors& tensors,
                     const std::string& source);

/// Throws DataError when there is nothing of that name.
void check_weights_exist(const std::filesystem::path& path);

/// Reads weights into a model. `path` is one of these:
/// - a safetensors file,
/// - a checkpoint (`step-*`), whose hashes are checked,
/// - a folder of checkpoints, of which the newest whole one is read,
/// - a folder with model.safetensors.
///
/// A prefix "module.", as DDP in Python leaves behind, is taken away. Throws DataError and
/// CheckpointError.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path);

/// Writes a model's state_dict as safetensors.
void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
