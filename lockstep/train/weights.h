#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "lockstep/data/safetensors.h"
#include "lockstep/parallel/state_dict.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

/// Throws DataError when there is nothing of that name.
void check_weights_exist(const std::filesystem::path& path);

/// Reads weights into a model. `path` is one of these:
/// - a checkpoint (`step-*`), whose hashes are checked,
/// - a folder of checkpoints, of which the newest whole one is read,
/// - a folder with model.safetensors,
/// - what else TensorReader takes: a safetensors or .pt file, or a folder that Hugging Face's
///   libraries or torch.distributed.checkpoint have written. Only the model's tensors are read.
///
/// Prefixes that wrappers and checkpoints in Python leave behind are taken away: "module.",
/// "_orig_mod.", "state_dict.", "model.", "model_state_dict.", "MODEL_STATE." and the like. Throws
/// DataError and CheckpointError.
void load_weights(torch::nn::Module& module, const std::filesystem::path& path);

/// Throws UsageError, which begins with `what`, for the name of a file to be written that says
/// another format than safetensors or .pt ("model.onnx"). A name without an extension says none.
void check_weights_name(const std::string& what, const std::filesystem::path& path);

/// Writes tensors, as a Strategy's model_state gives them, as Python's safetensors.torch would, or
/// as torch.save where the name ends with .pt, .pth or .bin: then without the metadata.
void save_weights(const StateDict& tensors, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata = {});
/// Writes a model's state_dict as safetensors.
void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
