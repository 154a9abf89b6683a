#include "lockstep/parallel/pipeline/stage_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

/// Apart from the tags of the stages' other messages.
constexpr int kStateTag = 1 << 22;

/// "exp_avg.3" as its name and its number; none for other text.
std::optional<std::pair<std::string, size_t>> parts_of(const std::string& key) {
  const size_t dot = key.rfind('.');
  if (dot == std::string::npos) return std::nullopt;
  const auto index = parse_int(key.substr(dot + 1));
  if (!index || *index < 0) return std::nullopt;
  return std::pair(key.substr(0, dot), static_cast<size_t>(*index));
}

std::string key_of(const std::string& name, size_t index) {
  return name + "." + std::to_string(index);
}

Json described(const StateDict& state) {
  Json list = Json::array();
  for (const auto& [name, tensor] : state) {
    list.push_back({name, static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()});
  }
  return list;
}

}  // namespace

StageState::StageState(torch::nn::Module& module, const StageTensors& tensors,
                       ProcessGroup pipeline, c10::Device device)
    : module_(module), tensors_(tensors), pipeline_(std::move(pipeline)), device_(device) {}

StateDict StageState::gather_model() const {
  const at::NoGradGuard no_grad;
  const int me = pipeline_.rank();
  std::unordered_map<const c10::TensorImpl*, at::Tensor> whole;
  for (const auto& list : {tensors_.parameters(), tensors_.buffers()}) {
    for (const StageTensor& item : list) {
      if (item.owner() == 0) {
        whole[item.tensor.unsafeGetTensorImpl()] = item.tensor.detach();
      } else if (me == 0) {
        at::Tensor received = at::empty(item.tensor.sizes(), item.tensor.options());
        pipeline_.recv(received, item.owner(), kStateTag);
        whole[item.tensor.unsafeGetTensorImpl()] = std::move(received);
      } else if (me == item.owner()) {
        pipeline_.send(item.tensor.detach().contiguous(), 0, kStateTag);
      }
    }
  }
  if (me != 0) return {};
  StateDict state = state_dict(module_);
  for (auto& [name, tensor] : state) tensor = whole.at(tensor.unsafeGetTensorImpl());
  return state;
}

StateDict StageState::gather_optimizer(const StateDict& own) const {
  const at::NoGradGuard no_grad;
  const int me = pipeline_.rank();
  StateDict mine;
  for (const auto& [key, tensor] : own) {
    // A rank without parameters has an optimizer of one tensor without elements.
    if (tensors_.own().empty()) break;
    const auto parts = parts_of(key);
    if (!parts) throw CheckpointError("pipeline: an optimizer's state has an entry '" + key + "'");
    const size_t index = tensors_.own().at(parts->second);
    // The owners of a tied parameter have the same state of it.
    if (tensors_.parameters()[index].owner() == me) {
      mine.emplace_back(key_of(parts->first, index), tensor);
    }
  }
  const std::vector<Json> all = pipeline_.gather_object(described(mine), 0);
  if (me != 0) {
    for (const auto& [name, tensor] : mine) {
      pipeline_.send(tensor.to(device_).contiguous(), 0, kStateTag);
    }
    return {};
  }
  for (int rank = 1; rank < pipeline_.size(); ++rank) {
    for (const Json& entry : all[static_cast<size_t>(rank)]) {
      at::Tensor tensor = at::empty(
          entry[2].get<std::vector<int64_t>>(),
          at::TensorOptions(device_).dtype(static_cast<at::ScalarType>(entry[1].get<int>())));
      pipeline_.recv(tensor, rank, kStateTag);
      mine.emplace_back(entry[0].get<std::string>(), std::move(tensor));
    }
  }
  std::stable_sort(mine.begin(), mine.end(), [](const auto& a, const auto& b) {
    return parts_of(a.first)->second < parts_of(b.first)->second;
  });
  return mine;
}

void StageState::load_model(const StateDict& whole) const {
  const at::NoGradGuard no_grad;
  check_state_dict(module_, whole, "the checkpoint's model.safetensors");
  const std::map<std::string, at::Tensor> given(whole.begin(), whole.end());
  std::unordered_map<const c10::TensorImpl*, bool> is_own;
  for (const StageTensor& parameter : tensors_.parameters()) {
    is_own[parameter.tensor.unsafeGetTensorImpl()] = parameter.is_on(pipeline_.rank());
  }
  for (auto& [name, tensor] : state_dict(module_)) {
    const auto parameter = is_own.find(tensor.unsafeGetTensorImpl());
    if (parameter == is_own.end() || parameter->second) tensor.copy_(given.at(name));
  }
}

StateDict StageState::own_part(const StateDict& whole) const {
  StateDict part;
  for (const auto& [key, tensor] : whole) {
    const auto parts = parts_of(key);
    if (!parts || parts->second >= tensors_.parameters().size()) {
      throw CheckpointError("the optimizer's state has an entry '" + key + "', but the model has " +
                                std::to_string(tensors_.parameters().size()) + " parameters",
                            "give the --model that the checkpoint was saved from");
    }
    const auto found = std::find(tensors_.own().begin(), tensors_.own().end(), parts->second);
    if (found == tensors_.own().end()) continue;
    part.emplace_back(key_of(parts->first, static_cast<size_t>(found - tensors_.own().begin())),
                      tensor);
  }
  return part;
}

}  // namespace lockstep::detail
