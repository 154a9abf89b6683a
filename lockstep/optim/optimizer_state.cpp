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

void check_shape(const std::string& optimizer, const std::string& key, const StateField& field,
                 const at::Tensor& tensor, const at::Tensor& parameter) {
  if (!tensor.defined()) refuse(optimizer, key, "is empty");
  if (field.kind == StateKind::count) {
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

std::vector<StateEntry> read_state(const std::string& optimizer, const StateDict& state,
                                   const std::vector<StateField>& fields,
                                   const std::vector<at::Tensor>& parameters) {
  std::vector<StateEntry> entries;
  for (const auto& [key, tensor] : state) {
    const size_t dot = key.rfind('.');
    const std::string name = key.substr(0, dot);
    const int64_t index =
        dot == std::string::npos ? -1 : parse_int(key.substr(dot + 1)).value_or(-1);
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&](const StateField& f) { return f.name == name; });
    if (field == fields.end() || index < 0) refuse(optimizer, key, "is none that it keeps");
    if (index >= static_cast<int64_t>(parameters.size())) {
      refuse(
          optimizer, key,
          "is for a parameter that does not exist; there are " + std::to_string(parameters.size()));
    }
    check_shape(optimizer, key, *field, tensor, parameters[index]);
    entries.push_back({name, static_cast<size_t>(index), tensor});
  }
  return entries;
}

at::Tensor copy_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  const c10::AutoGradMode no_grad(false);
  at::Tensor copy = at::empty_like(parameter.detach());
  copy.copy_(tensor);
  return copy;
}

}  // namespace lockstep
