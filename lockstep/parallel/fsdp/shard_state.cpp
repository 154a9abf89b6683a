#include "lockstep/parallel/fsdp/shard_state.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

std::unordered_set<const c10::TensorImpl*> sharded_tensors(const ShardedParameters& parameters) {
  std::unordered_set<const c10::TensorImpl*> sharded;
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters)
      sharded.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  return sharded;
}

}  // namespace

StateDict gather_model_state(const torch::nn::Module& module, const ShardedParameters& parameters) {
  const c10::AutoGradMode no_grad(false);
  const StateSpread spread = spread_of(parameters);
  StateDict local;
  for (const Piece& piece : parameters.pieces())
    local.emplace_back(state_key("value", parameters.parameter_of(piece).index),
                       parameters.shard(piece.unit).narrow(0, piece.shard_offset, piece.size));
  std::unordered_map<const c10::TensorImpl*, at::Tensor> values;
  for (const auto& [key, tensor] : gather_state(spread, local, 0, "FullyShardedDataParallel"))
    values[spread.parameters[parse_state_key(key).index].unsafeGetTensorImpl()] = tensor;
  StateDict state;
  if (parameters.group().rank() != 0) return state;
  for (const auto& [name, tensor] : state_dict(module)) {
    const auto found = values.find(tensor.unsafeGetTensorImpl());
    if (found != values.end()) {
      state.emplace_back(name, found->second);
    } else {
      // A parameter without elements is in no shard, and must not be used by one rank alone.
      state.emplace_back(name, tensor.numel() > 0
                                   ? tensor.detach()
                                   : at::empty(tensor.sizes(), tensor.scalar_type()));
    }
  }
  return state;
}

void load_model_state(torch::nn::Module& module, const ShardedParameters& parameters,
                      const StateDict& state, const std::string& source) {
  check_state_dict(module, state, source);
  const std::map<std::string, at::Tensor> given(state.begin(), state.end());
  std::unordered_set<const c10::TensorImpl*> others = sharded_tensors(parameters);
  for (const Piece& piece : parameters.pieces())
    others.erase(parameters.parameter_of(piece).tensor.unsafeGetTensorImpl());
  std::vector<Shard> needed;
  for (const auto& [name, tensor] : state_dict(module)) {
    if (!others.contains(tensor.unsafeGetTensorImpl()))
      needed.push_back(
          {name, tensor.sizes().vec(), 0, elements_like(given.at(name).detach(), tensor)});
  }
  load_shards(module, parameters, needed, source);
}

std::vector<Shard> shards_of(const torch::nn::Module& module, const ShardedParameters& parameters) {
  std::vector<Shard> shards;
  std::unordered_map<const c10::TensorImpl*, std::vector<const Piece*>> pieces;
  const auto sharded = sharded_tensors(parameters);
  for (const Piece& piece : parameters.pieces())
    pieces[parameters.parameter_of(piece).tensor.unsafeGetTensorImpl()].push_back(&piece);
  for (const auto& [name, tensor] : state_dict(module)) {
    const auto* const impl = tensor.unsafeGetTensorImpl();
    for (const Piece* piece : pieces[impl])
      shards.push_back({name, tensor.sizes().vec(), piece->begin,
                        parameters.shard(piece->unit).narrow(0, piece->shard_offset, piece->size)});
    if (!sharded.contains(impl) && parameters.group().rank() == 0)
      shards.push_back({name, tensor.sizes().vec(), 0, elements_like(tensor.detach(), tensor)});
  }
  return shards;
}

std::vector<TensorShard> model_shards(const torch::nn::Module& module,
                                      const ShardedParameters& parameters) {
  const StateDict state = state_dict(module);
  const std::map<std::string, at::Tensor> tensors(state.begin(), state.end());
  std::vector<TensorShard> all;
  const auto add = [&](const std::vector<TensorShard>& some) {
    all.insert(all.end(), some.begin(), some.end());
  };
  for (const Shard& shard : shards_of(module, parameters))
    add(shards_of_range(shard.name, tensors.at(shard.name), shard.begin, shard.values));
  for (const auto& item : state) {
    if (item.second.numel() == 0 && parameters.group().rank() == 0) add(whole_shards({item}));
  }
  return all;
}

std::map<std::string, std::vector<TensorBox>> needed_of_model(const torch::nn::Module& module,
                                                              const ShardedParameters& parameters) {
  std::unordered_map<const c10::TensorImpl*, std::vector<TensorBox>> boxes;
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters)
      boxes[parameter.tensor.unsafeGetTensorImpl()] = {};
  }
  for (const Piece& piece : parameters.pieces()) {
    const at::Tensor& tensor = parameters.parameter_of(piece).tensor;
    boxes[tensor.unsafeGetTensorImpl()] = boxes_of_range(tensor, piece.begin, piece.size);
  }
  std::map<std::string, std::vector<TensorBox>> needed;
  for (const auto& [name, tensor] : state_dict(module)) {
    const auto found = boxes.find(tensor.unsafeGetTensorImpl());
    if (found != boxes.end()) needed[name] = found->second;
  }
  return needed;
}

void load_shards(torch::nn::Module& module, const ShardedParameters& parameters,
                 const std::vector<Shard>& given, const std::string& source) {
  const c10::AutoGradMode no_grad(false);
  std::unordered_map<std::string, std::vector<const Shard*>> by_name;
  for (const Shard& shard : given) by_name[shard.name].push_back(&shard);
  // Copies elements [begin, end) of a tensor to `target`.
  const auto fill = [&](const std::string& name, const at::Tensor& tensor, int64_t begin,
                        const at::Tensor& target) {
    int64_t filled = 0;
    const int64_t end = begin + target.numel();
    for (const Shard* shard : by_name[name]) {
      if (shard->sizes != tensor.sizes().vec())
        throw CheckpointError(source + ": '" + name + "' is " + c10::str(shard->sizes) +
                                  ", expected " + c10::str(tensor.sizes()),
                              "it is of another model");
      const int64_t from = std::max(begin, shard->begin);
      const int64_t to = std::min(end, shard->begin + shard->values.numel());
      if (from >= to) continue;
      target.narrow(0, from - begin, to - from)
          .copy_(shard->values.narrow(0, from - shard->begin, to - from));
      filled += to - from;
    }
    if (filled < target.numel())
      throw CheckpointError(source + " lacks " + std::to_string(target.numel() - filled) +
                                " elements of '" + name + "' that rank " +
                                std::to_string(parameters.group().rank()) + " keeps",
                            "give the shards of all ranks that saved it");
  };
  const auto sharded = sharded_tensors(parameters);
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  StateDict own = state_dict(module);
  for (const auto& [name, tensor] : own) names.emplace(tensor.unsafeGetTensorImpl(), name);
  for (const Piece& piece : parameters.pieces()) {
    const at::Tensor& tensor = parameters.parameter_of(piece).tensor;
    fill(names.at(tensor.unsafeGetTensorImpl()), tensor, piece.begin,
         parameters.shard(piece.unit).narrow(0, piece.shard_offset, piece.size));
  }
  for (auto& [name, tensor] : own) {
    if (sharded.contains(tensor.unsafeGetTensorImpl())) continue;
    const at::Tensor values = at::empty({tensor.numel()}, tensor.options());
    fill(name, tensor, 0, values);
    tensor.copy_(view_like(values, 0, tensor));
  }
}

StateSpread spread_of(const ShardedParameters& parameters) {
  struct Place {
    int64_t offset, shard_size;
  };
  std::vector<Place> places;
  StateSpread spread{parameters.group(), {}, {}, /*always_vectors=*/true};
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters) {
      places.resize(std::max(places.size(), parameter.index + 1));
      spread.parameters.resize(places.size());
      places[parameter.index] = {parameter.offset, unit.shard_size};
      spread.parameters[parameter.index] = parameter.tensor;
    }
  }
  spread.part = [places = std::move(places), all = spread.parameters](int rank, size_t index) {
    const auto [offset, size] = places[index];
    const int64_t count = all[index].numel();
    const int64_t begin = std::clamp<int64_t>(rank * size - offset, 0, count);
    return Part{begin, std::clamp<int64_t>((rank + 1) * size - offset, begin, count)};
  };
  return spread;
}

}  // namespace lockstep::detail
