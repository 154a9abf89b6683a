#include "lockstep/train/weights.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string shape_text(const at::Tensor& tensor) {
  std::vector<std::string> sizes;
  for (const int64_t size : tensor.sizes()) sizes.push_back(std::to_string(size));
  return "[" + join(sizes, ", ") + "]";
}

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

std::string differences(const NamedTensors& own, std::map<std::string, at::Tensor> given) {
  std::vector<std::string> list;
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) {
      list.push_back(name + " " + shape_text(tensor) + " is missing");
      continue;
    }
    if (found->second.sizes() != tensor.sizes()) {
      list.push_back(name + " has shape " + shape_text(found->second) + ", the model's has " +
                     shape_text(tensor));
    }
    given.erase(found);
  }
  for (const auto& [name, tensor] : given) {
    list.push_back(name + " " + shape_text(tensor) + " is not in the model");
  }
  return join(list, "; ");
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
    throw CheckpointError(source + " does not fit the model: " + wrong,
                          "give the --model that the weights were saved from");
  }
  for (auto& [name, tensor] : own) tensor.copy_(given.at(name));
}

void load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  NamedTensors tensors = load_safetensors(path).tensors;
  constexpr std::string_view kPrefix = "module.";
  const bool wrapped =
      !tensors.empty() && std::all_of(tensors.begin(), tensors.end(),
                                      [&](auto& t) { return t.first.starts_with(kPrefix); });
  if (wrapped) {
    for (auto& [name, tensor] : tensors) name.erase(0, kPrefix.size());
  }
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
