#include "lockstep/parallel/pipeline/stage_tensors.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

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
