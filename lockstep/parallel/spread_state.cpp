#include "lockstep/parallel/spread_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

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

std::map<size_t, std::vector<TensorBox>> needed_state(const StateSpread& spread) {
  std::map<size_t, std::vector<TensorBox>> needed;
  for (size_t i = 0; i < spread.parameters.size(); ++i) {
    const Part part = spread.part(spread.group.rank(), i);
    needed[i] = boxes_of_range(spread.parameters[i], part.begin, part.numel());
  }
  return needed;
}

StateDict by_whole_index(const StateDict& own, const std::vector<size_t>& indices) {
  StateDict whole;
  for (const auto& [text, tensor] : own) {
    const StateKey key = parse_state_key(text);
    whole.emplace_back(state_key(key.name, indices.at(key.index)), tensor);
  }
  return whole;
}

StateDict by_own_index(const StateDict& whole, const std::vector<size_t>& indices) {
  StateDict own;
  for (const auto& [text, tensor] : whole) {
    const StateKey key = parse_state_key(text);
    const auto found = std::find(indices.begin(), indices.end(), key.index);
    if (found == indices.end()) continue;
    own.emplace_back(state_key(key.name, static_cast<size_t>(found - indices.begin())), tensor);
  }
  return own;
}

}  // namespace lockstep::detail
