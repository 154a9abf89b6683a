#include "lockstep/parallel/pipeline/stage_state.h"

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/optim/optimizer_state.h"

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

using Places = std::unordered_map<const c10::TensorImpl*, size_t>;

Places places_of(const std::vector<at::Tensor>& tensors) {
  Places places;
  for (const at::Tensor& tensor : tensors)
    places.emplace(tensor.unsafeGetTensorImpl(), places.size());
  return places;
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

SpreadModel StageTensors::spread_model(torch::nn::Module& module, SpreadModel stages,
                                       const ProcessGroup& group) const {
  std::vector<StageTensor> all = parameters_;
  all.insert(all.end(), buffers_.begin(), buffers_.end());
  const auto places = std::make_shared<const Places>(places_of(stages.tensors));
  SpreadModel whole{module, {}, parameters_.size(), {group, shapes_of(all), {}}, {}, {}};
  whole.spread.always_vectors = stages.spread.always_vectors;
  for (size_t i = 0; i < all.size(); ++i) {
    whole.tensors.push_back(all[i].tensor);
    const auto place = places->find(all[i].tensor.unsafeGetTensorImpl());
    const bool gives = i < parameters_.size() || all[i].owner() == rank_;
    const bool has = place != places->end() && gives;
    whole.spread.parts.push_back(has ? stages.spread.parts[place->second] : Part());
    if (has) whole.spread.parameters[i] = stages.spread.parameters[place->second];
  }
  const auto at = [places, tensors = whole.tensors](size_t i) {
    return places->find(tensors[i].unsafeGetTensorImpl());
  };
  whole.values = [at, places, of = stages.values](size_t i) {
    return at(i) == places->end() ? at::Tensor() : of(at(i)->second);
  };
  whole.store = [at, of = stages.store](size_t i, const at::Tensor& value) {
    of(at(i)->second, value);
  };
  return whole;
}

SpreadOptimizer StageTensors::spread_optimizer(SpreadOptimizer stages,
                                               const ProcessGroup& group) const {
  const std::vector<size_t> whole_of = wholes_of(stages);
  StateSpread spread{group, shapes_of(parameters_), std::vector<Part>(parameters_.size())};
  spread.always_vectors = stages.spread.always_vectors;
  for (size_t j = 0; j < whole_of.size(); ++j) {
    if (whole_of[j] == SpreadOptimizer::kNone) continue;
    spread.parameters[whole_of[j]] = stages.spread.parameters[j];
    spread.parts[whole_of[j]] = stages.spread.parts[j];
  }
  stages.spread = std::move(spread);
  for (size_t& index : stages.indices) {
    if (index != SpreadOptimizer::kNone) index = whole_of[index];
  }
  for (auto& [text, tensor] : stages.frozen) {
    const StateKey key = parse_state_key(text);
    text = state_key(key.name, whole_of[key.index]);
  }
  return stages;
}

StateDict StageTensors::stage_state(const StateDict& whole, const SpreadOptimizer& stages) const {
  const std::vector<size_t> whole_of = wholes_of(stages);
  StateDict state;
  for (const auto& [text, tensor] : whole) {
    const StateKey key = parse_state_key(text);
    if (key.index >= parameters_.size())
      throw CheckpointError("the optimizer state's '" + text +
                                "' is for a parameter that does not exist; there are " +
                                std::to_string(parameters_.size()),
                            "the checkpoint is of another model or optimizer");
    const auto found = std::ranges::find(whole_of, key.index);
    if (found == whole_of.end()) continue;
    const auto index = static_cast<size_t>(found - whole_of.begin());
    state.emplace_back(state_key(key.name, index), tensor);
  }
  return state;
}

/// By the stages' indices.
std::vector<size_t> StageTensors::wholes_of(const SpreadOptimizer& stages) const {
  const Places places = places_of(own_parameters());
  std::vector<size_t> whole_of;
  for (const at::Tensor& parameter : stages.spread.parameters) {
    const auto place = places.find(parameter.unsafeGetTensorImpl());
    whole_of.push_back(place == places.end() ? SpreadOptimizer::kNone : own_[place->second]);
  }
  return whole_of;
}

std::shared_ptr<torch::nn::Module> module_of_stages(
    const std::shared_ptr<torch::nn::Module>& whole,
    const std::vector<std::shared_ptr<torch::nn::Module>>& layers) {
  std::map<std::string, std::shared_ptr<torch::nn::Module>> named;  // Ancestors come first.
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] == whole) return whole;
    std::string name = "layer" + std::to_string(i);
    for (const auto& entry : whole->named_modules("", /*include_self=*/false)) {
      if (entry.value() == layers[i]) name = entry.key();
    }
    named.emplace(name, layers[i]);
  }
  std::map<std::string, std::shared_ptr<torch::nn::Module>> made{
      {"", std::make_shared<torch::nn::Module>()}};
  for (const auto& [name, module] : named) {
    std::string path;
    std::shared_ptr<torch::nn::Module> at = made[""];
    for (const std::string& part : split(name, '.')) {
      path += (path.empty() ? "" : ".") + part;
      if (path != name && named.contains(path)) break;  // Within another layer.
      auto& child = made[path];
      if (!child)
        at->register_module(part,
                            child = path == name ? module : std::make_shared<torch::nn::Module>());
      at = child;
    }
  }
  if (made[""]->parameters().empty()) made[""]->register_parameter("none", at::empty({0}));
  return made[""];
}

}  // namespace lockstep::detail
