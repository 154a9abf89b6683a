#include "lockstep/train/weights.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/save_checkpoint.h"

namespace lockstep {
namespace fs = std::filesystem;
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix, NamedTensors& into) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    into.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    into.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", into);
  }
}

/// "2 missing (a, b)", "9 missing (a, b, c, ...)"; empty for none.
std::string summary(const std::vector<std::string>& tensors, const std::string& what) {
  constexpr size_t kShown = 3;
  if (tensors.empty()) return {};
  const auto shown = static_cast<std::ptrdiff_t>(std::min(tensors.size(), kShown));
  return std::to_string(tensors.size()) + " " + what + " (" +
         join({tensors.begin(), tensors.begin() + shown}, ", ") +
         (tensors.size() > kShown ? ", ...)" : ")");
}

std::string differences(const NamedTensors& own, std::map<std::string, at::Tensor> given) {
  std::vector<std::string> missing, other_shape, unexpected;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      missing.push_back(name + " " + c10::str(tensor.sizes()));
      continue;
    }
    if (found->second.sizes() != tensor.sizes()) {
      other_shape.push_back(name + " " + c10::str(found->second.sizes()) + " in place of " +
                            c10::str(tensor.sizes()));
    }
    given.erase(found);
  }
  for (const auto& [name, tensor] : given)
    unexpected.push_back(name + " " + c10::str(tensor.sizes()));
  std::vector<std::string> parts;
  for (const auto& part : {summary(missing, "missing"), summary(unexpected, "unexpected"),
                           summary(other_shape, "of another shape")}) {
    if (!part.empty()) parts.push_back(part);
  }
  return join(parts, ", ");
}

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

NamedTensors state_dict(const torch::nn::Module& module) {
  NamedTensors tensors;
  collect(module, "", tensors);
  return tensors;
}

void load_state_dict(torch::nn::Module& module, const NamedTensors& tensors,
                     const std::string& source) {
  const at::NoGradGuard no_grad;
  NamedTensors own = state_dict(module);
  const std::map<std::string, at::Tensor> given(tensors.begin(), tensors.end());
  const std::string wrong = differences(own, given);
  if (!wrong.empty()) {
    throw CheckpointError(source + " does not fit the model; tensors: " + wrong,
                          "give the --model that the weights were saved from");
  }
  for (auto& [name, tensor] : own) tensor.copy_(given.at(name));
}

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

void save_weights(const torch::nn::Module& module, const std::filesystem::path& path,
                  const std::map<std::string, std::string>& metadata) {
  std::map<std::string, std::string> all = metadata;
  all.emplace("format", "pt");
  NamedTensors tensors = state_dict(module);
  for (auto& [name, tensor] : tensors) tensor = tensor.detach();
  save_safetensors(path, tensors, all);
}

}  // namespace lockstep
