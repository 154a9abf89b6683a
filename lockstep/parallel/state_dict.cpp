#include "lockstep/parallel/state_dict.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& into) {
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
  constexpr size_t kShown = 20;
  if (tensors.empty()) return {};
  const auto shown = static_cast<std::ptrdiff_t>(std::min(tensors.size(), kShown));
  return std::to_string(tensors.size()) + " " + what + " (" +
         join({tensors.begin(), tensors.begin() + shown}, ", ") +
         (tensors.size() > kShown ? ", ...)" : ")");
}

std::string differences(const StateDict& own, std::map<std::string, at::Tensor> given) {
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

}  // namespace

void detail::require_values(const StateDict& tensors) {
  for (const auto& [name, tensor] : tensors) {
    const bool strided = tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta();
    if (!strided || tensor.numel() < 2 ||
        tensor.storage().nbytes() != static_cast<size_t>(tensor.element_size()))
      continue;
    throw UsageError("the values of '" + name + "' are on another rank of a pipeline",
                     "use the strategy's model_state() and load_model_state()");
  }
}

StateDict state_dict(const torch::nn::Module& module) {
  StateDict tensors;
  collect(module, "", tensors);
  return tensors;
}

void check_state_dict(const torch::nn::Module& module, const StateDict& tensors,
                      const std::string& source, const std::string& hint) {
  const std::map<std::string, at::Tensor> given(tensors.begin(), tensors.end());
  const std::string wrong = differences(state_dict(module), given);
  if (wrong.empty()) return;
  throw CheckpointError(source + " does not fit the model; tensors: " + wrong,
                        hint.empty() ? "give the --model that the weights were saved from" : hint);
}

void load_state_dict(torch::nn::Module& module, const StateDict& tensors, const std::string& source,
                     const std::string& hint) {
  check_state_dict(module, tensors, source, hint);
  const at::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> given(tensors.begin(), tensors.end());
  const StateDict own = state_dict(module);
  detail::require_values(own);
  for (const auto& [name, tensor] : own) tensor.copy_(given.at(name));
}

}  // namespace lockstep
