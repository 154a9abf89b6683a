#include "lockstep/train/weights.h"

#include <torch/nn/module.h>

#include <map>
#include <optional>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/data/pt_file.h"
#include "lockstep/data/tensor_reader.h"

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

/// What a folder of files has its weights in.
fs::path weights_in(const fs::path& path) {
  const fs::path file = path / "model.safetensors";
  return fs::is_directory(path) && fs::exists(file) ? file : path;
}

/// Whether a file's prefix is of what wraps a module or names a part of a checkpoint.
bool is_wrapper(const std::string& prefix) {
  static const std::set<std::string> known = {
      "module",      "_orig_mod",        "model",      "net", "state_dict",
      "model_state", "model_state_dict", "MODEL_STATE"};
  size_t begin = 0;
  for (size_t dot = 0; (dot = prefix.find('.', begin)) != std::string::npos; begin = dot + 1) {
    if (!known.contains(prefix.substr(begin, dot - begin))) return false;
  }
  return begin == prefix.size();
}

/// What stands in `tensors` before the names of `wanted`. Empty where nothing that is known does.
std::string prefix_of(const std::vector<TensorInfo>& tensors, const StateDict& wanted) {
  if (wanted.empty()) return {};
  const std::string& first = wanted.front().first;
  std::string shortest;
  for (const auto& [name, dtype, shape] : tensors) {
    if (name == first) return {};
    if (!name.ends_with("." + first)) continue;
    const std::string prefix = name.substr(0, name.size() - first.size());
    if (is_wrapper(prefix) && (shortest.empty() || prefix.size() < shortest.size())) {
      shortest = prefix;
    }
  }
  return shortest;
}

StateDict read_weights(const fs::path& path, const StateDict& wanted) {
  if (fs::is_directory(path)) {
    if (auto checkpoint = checkpoint_at(path)) return std::move(checkpoint->model);
  }
  const TensorReader source(weights_in(path));
  const std::string prefix = prefix_of(source.tensors(), wanted);
  StateDict tensors;
  for (const TensorInfo& tensor : source.tensors()) {
    if (tensor.name.starts_with(prefix))
      tensors.emplace_back(tensor.name.substr(prefix.size()), source.read(tensor.name));
  }
  return tensors;
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
  load_state_dict(module, read_weights(path, state_dict(module)), path.string());
}

void check_weights_name(const std::string& what, const fs::path& path) {
  const std::string extension = path.extension().string();
  if (extension.empty() || !format_of_name(path).empty()) return;
  throw UsageError(what + " " + path.string() +
                       ": weights are written as safetensors or .pt, not as " + extension.substr(1),
                   "name the file " + fs::path(path).replace_extension(".safetensors").string());
}

void save_weights(const StateDict& tensors, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  if (format_of_name(path) == "pt") return save_pt(path, tensors);
  std::map<std::string, std::string> all = metadata;
  all.emplace("format", "pt");
  save_safetensors(path, tensors, all);
}

void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  StateDict tensors = state_dict(module);
  detail::require_values(tensors);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach();
  save_weights(tensors, path, metadata);
}

}  // namespace lockstep
