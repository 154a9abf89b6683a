#include "lockstep/optim/optimizer_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& optimizer, const std::string& key,
                         const std::string& what) {
  throw CheckpointError(optimizer + ": the optimizer state's '" + key + "' " + what,
                        "the checkpoint is of another model or optimizer");
}

void check_shape(const std::string& optimizer, const std::string& key, bool is_count,
                 const at::Tensor& tensor, const at::Tensor& parameter) {
  if (!tensor.defined()) refuse(optimizer, key, "is empty");
  if (is_count) {
    if (tensor.numel() != 1) refuse(optimizer, key, "is not one number");
  } else if (tensor.sizes() != parameter.sizes()) {
    refuse(optimizer, key,
           "has shape " + c10::str(tensor.sizes()) + ", the parameter has " +
               c10::str(parameter.sizes()));
  }
}

}  // namespace

std::string state_key(const std::string& name, size_t index) {
  return name + "." + std::to_string(index);
}

StateKey parse_state_key(const std::string& text) {
  const size_t dot = text.rfind('.');
  const auto index = dot == std::string::npos ? std::nullopt : parse_int(text.substr(dot + 1));
  if (index && *index >= 0) return {text.substr(0, dot), static_cast<size_t>(*index)};
  throw CheckpointError(
      "the optimizer state has an entry '" + text + "', expected NAME.parameter-index",
      "it is not an optimizer's state");
}

std::map<size_t, StateFields> read_state(const std::string& optimizer, const StateDict& state,
                                         const std::vector<std::string>& fields,
                                         const std::vector<at::Tensor>& parameters) {
  std::map<size_t, StateFields> entries;
  for (const auto& [key, tensor] : state) {
    const auto [name, index] = parse_state_key(key);
    if (std::find(fields.begin(), fields.end(), name) == fields.end())
      refuse(optimizer, key, "is none that it keeps");
    if (index >= parameters.size())
      refuse(
          optimizer, key,
          "is for a parameter that does not exist; there are " + std::to_string(parameters.size()));
    check_shape(optimizer, key, name == kStep, tensor, parameters[index]);
    entries[index][name] = tensor;
  }
  return entries;
}

bool has_field(const std::map<size_t, StateFields>& state, const std::string& field) {
  return std::any_of(state.begin(), state.end(),
                     [&](const auto& entry) { return entry.second.contains(field); });
}

const at::Tensor& required(const std::string& optimizer, const StateFields& fields,
                           const std::string& field, size_t index) {
  const auto found = fields.find(field);
  if (found != fields.end()) return found->second;
  throw CheckpointError(optimizer + ": the optimizer state lacks '" + state_key(field, index) + "'",
                        "the checkpoint is damaged or of another optimizer");
}

at::Tensor copy_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor copy = at::empty_like(parameter.detach());
  copy.copy_(tensor);
  return copy;
}

}  // namespace lockstep
