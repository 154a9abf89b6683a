#include "lockstep/parallel/pipeline/stage_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <map>
#include <unordered_map>
#include <utility>

#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

/// Apart from the tags of the stages' other messages.
constexpr int kStateTag = 1 << 22;

}  // namespace

StageState::StageState(torch::nn::Module& module, const StageTensors& tensors,
                       ProcessGroup pipeline)
    : module_(module), tensors_(tensors), pipeline_(std::move(pipeline)) {}

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

StateSpread StageState::spread() const {
  StateSpread spread{pipeline_, {}, [this](int rank, size_t index) {
                       const StageTensor& parameter = tensors_.parameters()[index];
                       return Part{0, parameter.is_on(rank) ? parameter.tensor.numel() : 0};
                     }};
  // Of no memory order of their own: on other ranks a parameter is freed, and has lost its.
  for (const StageTensor& parameter : tensors_.parameters())
    spread.parameters.push_back(at::empty({}, parameter.tensor.options().requires_grad(false))
                                    .expand(parameter.tensor.sizes()));
  return spread;
}

StateDict StageState::gather_optimizer(const StateDict& own) const {
  // A rank without parameters has an optimizer of one tensor without elements.
  const StateDict mine = tensors_.own().empty() ? StateDict() : own;
  return gather_state(spread(), by_whole_index(mine, tensors_.own()), 0, "strategy pipeline");
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
  return by_own_index(cut_state(spread(), whole, "strategy pipeline"), tensors_.own());
}

}  // namespace lockstep::detail
