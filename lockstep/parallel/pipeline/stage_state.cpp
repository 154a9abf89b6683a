#include "lockstep/parallel/pipeline/stage_state.h"

#include <ATen/ops/empty.h>
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

/// Of no memory order of their own: on other ranks a parameter is freed, and has lost its.
std::vector<at::Tensor> shapes_of(const std::vector<StageTensor>& tensors) {
  std::vector<at::Tensor> shapes;
  for (const auto& [name, tensor, ranks] : tensors)
    shapes.push_back(at::empty({}, tensor.options().requires_grad(false)).expand(tensor.sizes()));
  return shapes;
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

void StageTensors::free_others() {
  for (StageTensor& parameter : parameters_) {
    if (!parameter.is_on(rank_)) free_values(parameter.tensor);
  }
}

SpreadModel StageTensors::spread_model(torch::nn::Module& module,
                                       const ProcessGroup& pipeline) const {
  std::vector<StageTensor> all = parameters_;
  all.insert(all.end(), buffers_.begin(), buffers_.end());
  std::vector<at::Tensor> tensors;
  for (const StageTensor& item : all) tensors.push_back(item.tensor);
  const auto part = [all, count = parameters_.size()](int rank, size_t i) {
    const bool gives = i < count ? all[i].is_on(rank) : all[i].owner() == rank;
    return Part{0, gives ? all[i].tensor.numel() : 0};
  };
  const auto values = [tensors](size_t i) { return tensors[i].detach(); };
  const auto store = [tensors](size_t i, const at::Tensor& whole) {
    at::Tensor(tensors[i]).copy_(whole);
  };
  return {module, tensors, parameters_.size(), {pipeline, shapes_of(all), part}, values, store};
}

SpreadOptimizer StageTensors::spread_optimizer(const ProcessGroup& pipeline) const {
  const auto part = [this](int rank, size_t i) {
    return Part{0, parameters_[i].is_on(rank) ? parameters_[i].tensor.numel() : 0};
  };
  // A rank without parameters has an optimizer of one tensor without elements.
  return {{pipeline, shapes_of(parameters_), part},
          own_.empty() ? std::vector{SpreadOptimizer::kNone} : own_};
}

}  // namespace lockstep::detail
