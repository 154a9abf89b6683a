#include "lockstep/train/weights.h"

#include <torch/nn/module.h>

#include <map>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/checkpoint_folder.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

/// The checkpoint that a folder is, or the newest one in it; none when it is no such folder.
std::optional<Checkpoint> checkpoint_at(const fs::path& folder) {
  if (fs::exists(folder / "state.json")) return read_checkpoint(folder);
  auto newest = CheckpointFolder(folder).read_newest();
  if (!newest) return std::nullopt;
  log_info("weights of checkpoint " + newest->first.string());
  return std::move(newest->second);
}

NamedTensors read_weights(const fs::path& path) {
  if (!fs::is_directory(path)) return load_safetensors(path).tensors;
  if (auto checkpoint = checkpoint_at(path)) return std::move(checkpoint->model);
  const fs::path file = path / "model.safetensors";
  if (fs::exists(file)) return load_safetensors(file).tensors;
  throw DataError("folder " + path.string() +
                      " holds no weights: neither model.safetensors nor a checkpoint (step-*)",
                  "give a safetensors file, or the --checkpoint-dir of a run");
}

}  // namespace

void check_weights_exist(const fs::path& path) {
  std::error_code ignored;
  if (fs::exists(path, ignored)) return;
  throw DataError("no weights at " + path.string() + ": there is no such file or folder",
                  "give a safetensors file, as --save-weights writes, or a checkpoint's folder");
}

void load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  check_weights_exist(path);
  NamedTensors tensors = read_weights(path);
  NamedTensors unwrapped = with_prefix_removed(tensors, "module.");
  if (unwrapped.size() == tensors.size()) tensors = std::move(unwrapped);
  load_state_dict(module, tensors, path.string());
}

void check_weights_name(const std::string& what, const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension.empty() || extension == ".safetensors") return;
  throw UsageError(what + " " + path.string() + ": weights are written as safetensors, not as " +
                       extension.substr(1),
                   "name the file " + fs::path(path).replace_extension(".safetensors").string());
}

void save_weights(const NamedTensors& tensors, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  std::map<std::string, std::string> all = metadata;
  all.emplace("format", "pt");
  save_safetensors(path, tensors, all);
}

void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  NamedTensors tensors = state_dict(module);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach();
  save_weights(tensors, path, metadata);
}

}  // namespace lockstep
