#include "lockstep/parallel/spread_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

/// Counts are whole numbers, of one element, of parameters that are none. All else is like the
/// parameter.
bool is_count(const at::Tensor& tensor, const at::Tensor& parameter) {
  return tensor.numel() == 1 && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) &&
         !at::isIntegralType(parameter.scalar_type(), /*includeBool=*/true);
}

/// What this rank has of one.
std::vector<TensorBox> boxes_of_part(const StateSpread& spread, size_t index) {
  const Part part = spread.parts[index];
  return boxes_of_range(spread.parameters[index], part.begin, part.numel());
}

/// What this rank keeps of a whole state, by the whole's indices.
StateDict cut_state(const StateSpread& spread, const StateDict& whole, const std::string& what) {
  const c10::AutoGradMode no_grad(false);
  StateDict local;
  for (const auto& [text, tensor] : whole) {
    const StateKey key = parse_state_key(text);
    if (key.index >= spread.parameters.size())
      throw CheckpointError(what + ": the optimizer state's '" + text +
                                "' is for a parameter that does not exist; there are " +
                                std::to_string(spread.parameters.size()),
                            "the checkpoint is of another model or optimizer");
    const at::Tensor& parameter = spread.parameters[key.index];
    const bool like = tensor.defined() && tensor.sizes() == parameter.sizes();
    if (!like && !(tensor.defined() && is_count(tensor, parameter))) {
      throw CheckpointError(what + ": the optimizer state's '" + text + "' has shape " +
                                (tensor.defined() ? c10::str(tensor.sizes()) : "nothing") +
                                ", the parameter has " + c10::str(parameter.sizes()),
                            "the checkpoint is of another model or optimizer");
    }
    const Part part = spread.parts[key.index];
    if (part.numel() == 0) continue;
    const bool is_whole = part.numel() == parameter.numel() && !spread.always_vectors;
    local.emplace_back(text,
                       is_count(tensor, parameter) || is_whole
                           ? tensor
                           : elements_like(tensor, parameter).narrow(0, part.begin, part.numel()));
  }
  return local;
}

/// What this rank has of a value of a parameter: its part, or the whole.
std::vector<TensorShard> shards_of(const StateSpread& spread, size_t index, const std::string& name,
                                   const at::Tensor& tensor) {
  const at::Tensor& parameter = spread.parameters.at(index);
  const Part part = spread.parts.at(index);
  if (part.numel() == 0) return {};
  return is_count(tensor, parameter) || tensor.sizes() == parameter.sizes()
             ? whole_shards({{name, tensor}})
             : shards_of_range(name, parameter, part.begin, tensor.reshape({-1}));
}

}  // namespace

StateDict gather_shards(const ProcessGroup& group, const std::vector<TensorShard>& shards, int to) {
  const c10::AutoGradMode no_grad(false);
  StateDict state;
  if (!group) {
    for (const TensorShard& shard : shards) state.emplace_back(shard.name, shard.values);
    return state;
  }
  const c10::Device device = group.native().getBoundDeviceId().value_or(c10::Device(c10::kCPU));
  Json described = Json::array();
  for (const TensorShard& shard : shards)
    described.push_back({shard.name, shard.sizes, shard.offsets, shard.values.sizes().vec(),
                         static_cast<int>(shard.values.scalar_type())});
  const std::vector<Json> all = group.gather_object(described, to);
  if (group.rank() != to) {
    for (const TensorShard& shard : shards) group.send(shard.values.to(device).contiguous(), to);
    return {};
  }
  std::unordered_map<std::string, at::Tensor> known;
  for (int rank = 0; rank < group.size(); ++rank) {
    for (size_t i = 0; const Json& entry : all[static_cast<size_t>(rank)]) {
      TensorShard shard{entry[0], entry[1], entry[2], {}};
      const auto dtype = static_cast<at::ScalarType>(entry[4].get<int>());
      if (rank == to) {
        shard.values = shards[i++].values;
      } else {
        shard.values =
            at::empty(entry[3].get<std::vector<int64_t>>(), at::TensorOptions(device).dtype(dtype));
        group.recv(shard.values, rank);
      }
      at::Tensor& whole = known[shard.name];
      if (!whole.defined()) {
        whole = at::zeros(shard.sizes, dtype);
        state.emplace_back(shard.name, whole);
      }
      part_of(whole, shard.box()).copy_(shard.values);
    }
  }
  return state;
}

StateDict SpreadOptimizer::gather(const StateDict& own, int to) const {
  StateDict state = gather_shards(spread.group, shards(own), to);
  std::stable_sort(state.begin(), state.end(), [](const auto& a, const auto& b) {
    return parse_state_key(a.first).index < parse_state_key(b.first).index;
  });
  return state;
}

std::vector<TensorShard> SpreadOptimizer::shards(const StateDict& own) const {
  std::vector<TensorShard> all;
  const auto add = [&](const std::string& name, size_t index, const at::Tensor& tensor) {
    const auto some = shards_of(spread, index, state_key(name, index), tensor);
    all.insert(all.end(), some.begin(), some.end());
  };
  for (const auto& [text, tensor] : frozen) {
    const StateKey key = parse_state_key(text);
    add(key.name, key.index, tensor);
  }
  for (const auto& [text, tensor] : own) {
    const StateKey key = parse_state_key(text);
    if (indices.at(key.index) != kNone) add(key.name, indices[key.index], tensor);
  }
  return all;
}

std::map<size_t, std::vector<TensorBox>> SpreadOptimizer::needed() const {
  std::map<size_t, std::vector<TensorBox>> needed;
  for (size_t i = 0; i < spread.parameters.size(); ++i) needed[i] = boxes_of_part(spread, i);
  return needed;
}

std::pair<StateDict, StateDict> SpreadOptimizer::own_part(const StateDict& whole,
                                                          const std::string& what) const {
  StateDict trained, others;
  for (const auto& [text, tensor] : cut_state(spread, whole, what)) {
    const StateKey key = parse_state_key(text);
    const auto found = std::find(indices.begin(), indices.end(), key.index);
    if (found == indices.end()) {
      others.emplace_back(text, tensor.detach().clone());
    } else {
      trained.emplace_back(state_key(key.name, static_cast<size_t>(found - indices.begin())),
                           tensor);
    }
  }
  return {std::move(trained), std::move(others)};
}

void SpreadModel::each(const std::function<void(const std::string&, size_t)>& f) const {
  std::unordered_map<const c10::TensorImpl*, size_t> index;
  for (const at::Tensor& tensor : tensors)
    index.emplace(tensor.unsafeGetTensorImpl(), index.size());
  for (const auto& [name, tensor] : state_dict(module))
    f(name, index.at(tensor.unsafeGetTensorImpl()));
}

StateDict SpreadModel::gather() const {
  StateDict state;
  std::map<std::string, at::Tensor> whole;
  for (auto& [name, tensor] : gather_shards(spread.group, shards(), 0)) whole[name] = tensor;
  if (spread.group && spread.group.rank() != 0) return state;
  each([&](const std::string& name, size_t) { state.emplace_back(name, whole.at(name)); });
  return state;
}

void SpreadModel::load_each(
    const std::function<at::Tensor(const std::string&, size_t)>& whole) const {
  const c10::AutoGradMode no_grad(false);
  each([&](const std::string& name, size_t i) {
    if (i >= num_parameters) {
      at::Tensor(tensors[i]).copy_(whole(name, i));
    } else if (spread.parts[i].numel() > 0) {
      store(i, whole(name, i));
    }
  });
}

void SpreadModel::load(const StateDict& whole, const std::string& source) const {
  check_state_dict(module, whole, source);
  const std::map<std::string, at::Tensor> given(whole.begin(), whole.end());
  load_each([&](const std::string& name, size_t) { return given.at(name).detach(); });
}

void SpreadModel::load(const std::vector<TensorShard>& given, const std::string& source) const {
  std::unordered_map<std::string, std::vector<const TensorShard*>> by_name;
  for (const TensorShard& shard : given) by_name[shard.name].push_back(&shard);
  load_each([&](const std::string& name, size_t i) {
    const std::vector<const TensorShard*>& shards = by_name[name];
    at::Tensor whole = at::empty(
        tensors[i].sizes(), shards.empty() ? at::TensorOptions() : shards[0]->values.options());
    int64_t filled = 0;
    for (const TensorShard* shard : shards) {
      if (whole.sizes() != at::IntArrayRef(shard->sizes))
        throw CheckpointError(source + ": '" + name + "' is " + c10::str(shard->sizes) +
                                  ", expected " + c10::str(whole.sizes()),
                              "it is of another model");
      part_of(whole, shard->box()).copy_(shard->values);
      filled += shard->values.numel();
    }
    if (filled < whole.numel())
      throw CheckpointError(source + " lacks " + std::to_string(whole.numel() - filled) +
                                " elements of '" + name + "'",
                            "give the shards of all ranks that saved it");
    return whole;
  });
}

std::vector<TensorShard> SpreadModel::shards() const {
  std::vector<TensorShard> all;
  each([&](const std::string& name, size_t i) {
    // One without elements is in no part.
    const auto some = tensors[i].numel() > 0 ? shards_of(spread, i, name, values(i))
                      : !spread.group || spread.group.rank() == 0
                          ? whole_shards({{name, tensors[i]}})
                          : std::vector<TensorShard>();
    all.insert(all.end(), some.begin(), some.end());
  });
  return all;
}

std::map<std::string, std::vector<TensorBox>> SpreadModel::needed() const {
  std::map<std::string, std::vector<TensorBox>> needed;
  each([&](const std::string& name, size_t i) {
    if (i < num_parameters) needed[name] = boxes_of_part(spread, i);
  });
  return needed;
}

}  // namespace lockstep::detail
