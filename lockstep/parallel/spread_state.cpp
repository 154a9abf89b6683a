#include "lockstep/parallel/spread_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

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

/// The name under which a module's tensors are gathered as if they were an optimizer's state.
constexpr const char* kValue = "value";

struct Entry {
  StateKey key;
  at::Tensor values;  ///< A count, or the rank's part as a vector.
  bool is_count;
};

/// Counts are whole numbers, of one element, of parameters that are none. All else is like the
/// parameter.
bool is_count(const at::Tensor& tensor, const at::Tensor& parameter) {
  return tensor.numel() == 1 && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) &&
         !at::isIntegralType(parameter.scalar_type(), /*includeBool=*/true);
}

StateKey known_key(const std::string& text, const StateSpread& spread, const std::string& what) {
  StateKey key = parse_state_key(text);
  if (key.index < spread.parameters.size()) return key;
  throw CheckpointError(what + ": the optimizer state's '" + text +
                            "' is for a parameter that does not exist; there are " +
                            std::to_string(spread.parameters.size()),
                        "the checkpoint is of another model or optimizer");
}

/// What this rank has for the others.
std::vector<Entry> entries_of(const StateSpread& spread, const StateDict& local,
                              const std::string& what) {
  std::vector<Entry> entries;
  for (const auto& [text, tensor] : local) {
    const StateKey key = known_key(text, spread, what);
    if (spread.part(spread.group.rank(), key.index).numel() == 0) continue;
    const at::Tensor& parameter = spread.parameters[key.index];
    at::Tensor values = tensor;
    const bool count = is_count(tensor, parameter);
    if (!count) {
      values = tensor.sizes() == parameter.sizes() ? elements_like(tensor, parameter)
                                                   : tensor.reshape({-1});
      values = values.to(parameter.device());
    }
    entries.push_back({key, std::move(values), count});
  }
  return entries;
}

Json described(const std::vector<Entry>& entries) {
  Json list = Json::array();
  for (const auto& [key, values, is_count] : entries) {
    list.push_back({{"name", key.name},
                    {"index", key.index},
                    {"dtype", static_cast<int>(values.scalar_type())}});
    if (is_count) list.back()["count"] = values.item<int64_t>();
  }
  return list;
}

/// A whole state that comes in parts. Of a parameter fields stay in the order in which they come.
class Whole {
 public:
  explicit Whole(const StateSpread& spread) : spread_(spread) {}

  void put_count(const StateKey& key, int64_t count) {
    slot(key) = at::full({1}, count, at::kLong);
  }
  void put(const StateKey& key, int rank, const at::Tensor& values) {
    at::Tensor& flat = slot(key);
    if (!flat.defined())
      flat = at::zeros({spread_.parameters[key.index].numel()}, values.options().device(at::kCPU));
    const Part part = spread_.part(rank, key.index);
    flat.narrow(0, part.begin, part.numel()).copy_(values);
  }

  StateDict take() const {
    StateDict state;
    for (const auto& [index, fields] : fields_) {
      for (const auto& [name, flat] : fields)
        state.emplace_back(state_key(name, index),
                           is_count(flat, spread_.parameters[index])
                               ? flat
                               : view_like(flat, 0, spread_.parameters[index]));
    }
    return state;
  }

 private:
  at::Tensor& slot(const StateKey& key) {
    auto& fields = fields_[key.index];
    const auto found = std::find_if(fields.begin(), fields.end(),
                                    [&](const auto& field) { return field.first == key.name; });
    return found != fields.end() ? found->second
                                 : fields.emplace_back(key.name, at::Tensor()).second;
  }

  const StateSpread& spread_;
  std::map<size_t, StateDict> fields_;
};

StateDict exchange(const StateSpread& spread, const std::vector<Entry>& mine, int to) {
  const ProcessGroup& group = spread.group;
  const std::vector<Json> all = group.gather_object(described(mine), to);
  if (group.rank() != to) {
    for (const Entry& entry : mine) {
      if (!entry.is_count) group.send(entry.values, to);
    }
    return {};
  }
  Whole whole(spread);
  for (int rank = 0; rank < group.size(); ++rank) {
    for (size_t i = 0; const Json& entry : all[static_cast<size_t>(rank)]) {
      const StateKey key{entry["name"], entry["index"]};
      const size_t at = i++;
      if (entry.contains("count")) {
        whole.put_count(key, entry["count"]);
      } else if (rank == to) {
        whole.put(key, rank, mine[at].values);
      } else {
        at::Tensor values =
            at::empty({spread.part(rank, key.index).numel()},
                      at::TensorOptions(spread.parameters[key.index].device())
                          .dtype(static_cast<at::ScalarType>(entry["dtype"].get<int>())));
        group.recv(values, rank);
        whole.put(key, rank, values);
      }
    }
  }
  return whole.take();
}

/// What this rank has of one.
std::vector<TensorBox> boxes_of_part(const StateSpread& spread, size_t index) {
  const Part part = spread.part(spread.group.rank(), index);
  return boxes_of_range(spread.parameters[index], part.begin, part.numel());
}

}  // namespace

StateDict gather_state(const StateSpread& spread, const StateDict& local, int to,
                       const std::string& what) {
  const c10::AutoGradMode no_grad(false);
  const ProcessGroup& group = spread.group;
  if (to < 0 || to >= group.size()) {
    throw UsageError(what + ": rank " + std::to_string(to) + " is not of the group of " +
                     std::to_string(group.size()));
  }
  try {
    return exchange(spread, entries_of(spread, local, what), to);
  } catch (const TimeoutError& error) {
    throw TimeoutError(
        what + ", rank " + std::to_string(group.rank()) +
            ": the state is spread over all ranks, and not all came: " + error.what(),
        "call it on every rank, also where only one rank saves");
  }
}

StateDict cut_state(const StateSpread& spread, const StateDict& whole, const std::string& what) {
  const c10::AutoGradMode no_grad(false);
  StateDict local;
  for (const auto& [text, tensor] : whole) {
    const StateKey key = known_key(text, spread, what);
    const at::Tensor& parameter = spread.parameters[key.index];
    const bool like = tensor.defined() && tensor.sizes() == parameter.sizes();
    if (!like && !(tensor.defined() && is_count(tensor, parameter))) {
      throw CheckpointError(what + ": the optimizer state's '" + text + "' has shape " +
                                (tensor.defined() ? c10::str(tensor.sizes()) : "nothing") +
                                ", the parameter has " + c10::str(parameter.sizes()),
                            "the checkpoint is of another model or optimizer");
    }
    const Part part = spread.part(spread.group.rank(), key.index);
    if (part.numel() == 0) continue;
    const bool is_whole = part.numel() == parameter.numel() && !spread.always_vectors;
    local.emplace_back(text,
                       is_count(tensor, parameter) || is_whole
                           ? tensor
                           : elements_like(tensor, parameter).narrow(0, part.begin, part.numel()));
  }
  return local;
}

std::vector<TensorShard> state_shards(const StateSpread& spread, const StateDict& local) {
  std::vector<TensorShard> all;
  for (const auto& [text, tensor] : local) {
    const size_t index = parse_state_key(text).index;
    const at::Tensor& parameter = spread.parameters.at(index);
    const Part part = spread.part(spread.group.rank(), index);
    if (part.numel() == 0) continue;
    const bool whole = is_count(tensor, parameter) || tensor.sizes() == parameter.sizes();
    const auto some = whole ? whole_shards({{text, tensor}})
                            : shards_of_range(text, parameter, part.begin, tensor.reshape({-1}));
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

StateDict SpreadOptimizer::local(const StateDict& own) const {
  StateDict local = frozen;
  for (const auto& [text, tensor] : own) {
    const StateKey key = parse_state_key(text);
    if (indices.at(key.index) != kNone)
      local.emplace_back(state_key(key.name, indices[key.index]), tensor);
  }
  return local;
}

StateDict SpreadOptimizer::gather(const StateDict& own, const std::string& what, int to) const {
  return gather_state(spread, local(own), to, what);
}

std::vector<TensorShard> SpreadOptimizer::shards(const StateDict& own) const {
  return state_shards(spread, local(own));
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

StateDict SpreadModel::gather(const std::string& what) const {
  const int me = spread.group.rank();
  StateDict local;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (spread.part(me, i).numel() > 0) local.emplace_back(state_key(kValue, i), values(i));
  }
  std::map<std::string, at::Tensor> whole;
  for (auto& [key, tensor] : gather_state(spread, local, 0, what)) whole[key] = tensor;
  StateDict state;
  if (me != 0) return state;
  each([&](const std::string& name, size_t i) {
    // One without elements is in no part, and must not be used by one rank alone.
    const auto found = whole.find(state_key(kValue, i));
    state.emplace_back(name, found != whole.end()
                                 ? found->second
                                 : at::empty(tensors[i].sizes(), tensors[i].scalar_type()));
  });
  return state;
}

void SpreadModel::load_each(
    const std::function<at::Tensor(const std::string&, size_t)>& whole) const {
  const c10::AutoGradMode no_grad(false);
  each([&](const std::string& name, size_t i) {
    if (i >= num_parameters) {
      at::Tensor(tensors[i]).copy_(whole(name, i));
    } else if (spread.part(spread.group.rank(), i).numel() > 0) {
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
      at::Tensor target = whole;
      for (int64_t d = 0; d < whole.dim(); ++d)
        target = target.narrow(d, shard->offsets[static_cast<size_t>(d)], shard->values.size(d));
      target.copy_(shard->values);
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
    const bool is_empty = tensors[i].numel() == 0;
    std::vector<TensorShard> some;
    if (is_empty && spread.group.rank() == 0) some = whole_shards({{name, tensors[i]}});
    if (!is_empty) some = state_shards(spread, {{state_key(kValue, i), values(i)}});
    for (TensorShard& shard : some) {
      shard.name = name;
      all.push_back(std::move(shard));
    }
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
