#include "lockstep/parallel/pipeline/stage_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

/// Apart from the tags of the stages' other messages.
constexpr int kStateTag = 1 << 22;

using RanksOf = std::unordered_map<const c10::TensorImpl*, std::set<int>>;

RanksOf ranks_of_tensors(const std::vector<Layer>& layers, const std::vector<size_t>& starts,
                         int num_ranks) {
  RanksOf ranks;
  for (size_t stage = 0; stage < starts.size(); ++stage) {
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : layers.size();
    for (size_t i = starts[stage]; i < end; ++i) {
      if (!layers[i].module) continue;
      const int rank = static_cast<int>(stage) % num_ranks;
      for (const auto& tensors : {layers[i].module->parameters(), layers[i].module->buffers()}) {
        for (const at::Tensor& tensor : tensors) ranks[tensor.unsafeGetTensorImpl()].insert(rank);
      }
    }
  }
  return ranks;
}

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

std::vector<TensorShard> StageState::model_shards() const {
  std::unordered_map<const c10::TensorImpl*, bool> is_own;
  for (const auto& list : {tensors_.parameters(), tensors_.buffers()}) {
    for (const StageTensor& item : list)
      is_own[item.tensor.unsafeGetTensorImpl()] = item.owner() == pipeline_.rank();
  }
  StateDict state = state_dict(module_);
  std::erase_if(state,
                [&](const auto& item) { return !is_own.at(item.second.unsafeGetTensorImpl()); });
  return whole_shards(state);
}

std::map<std::string, std::vector<TensorBox>> StageState::needed_of_model() const {
  std::unordered_map<const c10::TensorImpl*, bool> is_others;
  for (const StageTensor& item : tensors_.parameters())
    is_others[item.tensor.unsafeGetTensorImpl()] = !item.is_on(pipeline_.rank());
  std::map<std::string, std::vector<TensorBox>> needed;
  for (const auto& [name, tensor] : state_dict(module_)) {
    const auto found = is_others.find(tensor.unsafeGetTensorImpl());
    if (found != is_others.end() && found->second) needed[name] = {};
  }
  return needed;
}

/// A rank without parameters has an optimizer of one tensor without elements.
StateDict StageState::local_state(const StateDict& own) const {
  return tensors_.own().empty() ? StateDict() : by_whole_index(own, tensors_.own());
}

std::vector<TensorShard> StageState::optimizer_shards(const StateDict& own) const {
  return state_shards(spread(), local_state(own));
}

std::map<size_t, std::vector<TensorBox>> StageState::needed_of_optimizer() const {
  return needed_state(spread());
}

StateDict StageState::gather_optimizer(const StateDict& own) const {
  return gather_state(spread(), local_state(own), 0, "strategy pipeline");
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

bool StageTensor::is_on(int rank) const {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

StageTensors::StageTensors(torch::nn::Module& module, const std::vector<Layer>& layers,
                           const std::vector<size_t>& starts, int rank, int num_ranks)
    : rank_(rank) {
  const ModuleState state = find_module_state(module, {}, "strategy pipeline");
  const RanksOf ranks = ranks_of_tensors(layers, starts, num_ranks);
  for (const NamedTensor& item : state.parameters) {
    const auto found = ranks.find(item.tensor.unsafeGetTensorImpl());
    if (found == ranks.end()) {
      throw UsageError("pipeline: parameter '" + item.name + "' is in none of the model's " +
                           std::to_string(layers.size()) + " layers: no stage would train it",
                       "name its module as Layer::module of the layer that uses it");
    }
    parameters_.push_back({item.name, item.tensor, {found->second.begin(), found->second.end()}});
    if (parameters_.back().is_on(rank)) own_.push_back(parameters_.size() - 1);
  }
  for (const NamedTensor& item : state.buffers) {
    const auto found = ranks.find(item.tensor.unsafeGetTensorImpl());
    const std::set<int> first{0};  // A buffer that no layer uses stays as it is on all.
    const std::set<int>& has = found == ranks.end() ? first : found->second;
    buffers_.push_back({item.name, item.tensor, {has.begin(), has.end()}});
  }
}

std::vector<at::Tensor> StageTensors::own_parameters() const {
  std::vector<at::Tensor> tensors;
  for (const size_t i : own_) tensors.push_back(parameters_[i].tensor);
  return tensors;
}

bool StageTensors::has_tied() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const StageTensor& parameter) {
    return parameter.ranks.size() > 1 && parameter.is_on(rank_);
  });
}

void StageTensors::free_others() {
  for (StageTensor& parameter : parameters_) {
    if (!parameter.is_on(rank_)) free_values(parameter.tensor);
  }
}

}  // namespace lockstep::detail
