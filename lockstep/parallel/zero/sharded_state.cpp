#include "lockstep/parallel/zero/sharded_state.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/optim/dense_layout.h"
#include "lockstep/optim/optimizer_state.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

bool is_count(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kLong && tensor.numel() == 1;
}

struct Key {
  std::string name;
  size_t index;  ///< Of the parameter.
};

Key key_of(const std::string& text, const ParameterShards& shards, const std::string& optimizer) {
  const size_t dot = text.rfind('.');
  const auto index = dot == std::string::npos ? std::nullopt : parse_int(text.substr(dot + 1));
  if (!index || *index < 0 || *index >= static_cast<int64_t>(shards.parameters().size())) {
    throw CheckpointError(optimizer + ": the optimizer state's '" + text +
                              "' is for a parameter that does not exist; there are " +
                              std::to_string(shards.parameters().size()),
                          "the checkpoint is of another model or optimizer");
  }
  return {text.substr(0, dot), static_cast<size_t>(*index)};
}

/// What `rank` sends of a parameter. Of one that is frozen nothing is in shards: rank 0 has it all.
Part sent_part(const ParameterShards& shards, int rank, size_t index) {
  if (shards.has(index)) return shards.part(rank, index);
  return {0, rank == 0 ? shards.parameters()[index].numel() : 0};
}

/// What a rank has, for the others: counts as they are, tensors to come in this order.
Json describe(const ParameterShards& shards, const StateDict& local) {
  Json list = Json::array();
  for (const auto& [text, tensor] : local) {
    const auto [name, index] = key_of(text, shards, "optimizer");
    if (sent_part(shards, shards.group().rank(), index).numel() == 0) continue;
    Json entry{{"name", name}, {"index", index}};
    if (is_count(tensor)) {
      entry["count"] = tensor.item<int64_t>();
    } else {
      entry["dtype"] = static_cast<int>(tensor.scalar_type());
    }
    list.push_back(std::move(entry));
  }
  return list;
}

/// A whole state that comes in parts.
class Whole {
 public:
  explicit Whole(const ParameterShards& shards) : shards_(shards) {}

  void put_count(const Key& key, int64_t count) { slot(key) = at::full({1}, count, at::kLong); }

  void put(const Key& key, int rank, const at::Tensor& part) {
    const at::Tensor& parameter = shards_.parameters()[key.index];
    at::Tensor& whole = slot(key);
    if (!whole.defined()) {
      whole =
          at::zeros_like(parameter.detach(), part.options().device(at::kCPU).requires_grad(false));
    }
    const auto [begin, end] = sent_part(shards_, rank, key.index);
    head(whole, whole.numel()).narrow(0, begin, end - begin).copy_(in_memory_order(part));
  }

  StateDict take() {
    StateDict state;
    for (auto& [index, fields] : fields_) {
      for (auto& [name, tensor] : fields) state.emplace_back(state_key(name, index), tensor);
    }
    return state;
  }

 private:
  static at::Tensor in_memory_order(const at::Tensor& part) {
    return part.dim() == 1 ? part : head(part, part.numel());
  }

  at::Tensor& slot(const Key& key) {
    auto& fields = fields_[key.index];
    for (auto& [name, tensor] : fields) {
      if (name == key.name) return tensor;
    }
    return fields.emplace_back(key.name, at::Tensor()).second;
  }

  const ParameterShards& shards_;
  std::map<size_t, StateDict> fields_;  ///< Fields of a parameter as the optimizer orders them.
};

void send_parts(const ParameterShards& shards, const StateDict& local, int to) {
  for (const auto& [text, tensor] : local) {
    const Key key = key_of(text, shards, "optimizer");
    if (is_count(tensor) || sent_part(shards, shards.group().rank(), key.index).numel() == 0)
      continue;
    // A part that is a whole parameter may have another order of elements.
    shards.group().send(head(tensor, tensor.numel()), to);
  }
}

void receive_parts(const ParameterShards& shards, const Json& entries, int from, Whole& whole) {
  for (const Json& entry : entries) {
    const Key key{entry["name"], entry["index"]};
    if (entry.contains("count")) {
      whole.put_count(key, entry["count"]);
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(entry["dtype"].get<int>());
    const auto& parameter = shards.parameters()[key.index];
    at::Tensor part = at::empty({sent_part(shards, from, key.index).numel()},
                                parameter.options().dtype(dtype).requires_grad(false));
    shards.group().recv(part, from);
    whole.put(key, from, part);
  }
}

}  // namespace

StateDict gather_state(const ParameterShards& shards, const StateDict& optimizer,
                       const StateDict& frozen, int to, const std::string& what) {
  const c10::AutoGradMode no_grad(false);
  const ProcessGroup& group = shards.group();
  if (to < 0 || to >= group.size()) {
    throw UsageError(what + ": rank " + std::to_string(to) + " is not of the group of " +
                     std::to_string(group.size()));
  }
  // Some optimizers have an entry of every tensor, also of those without elements.
  StateDict local;
  for (const auto& [text, tensor] : optimizer) {
    if (shards.has(key_of(text, shards, what).index)) local.emplace_back(text, tensor);
  }
  local.insert(local.end(), frozen.begin(), frozen.end());
  try {
    const auto all = group.gather_object(describe(shards, local), to);
    if (group.rank() != to) {
      send_parts(shards, local, to);
      return {};
    }
    Whole whole(shards);
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank != to) {
        receive_parts(shards, all[static_cast<size_t>(rank)], rank, whole);
        continue;
      }
      for (const auto& [text, tensor] : local) {
        const Key key = key_of(text, shards, "optimizer");
        if (sent_part(shards, rank, key.index).numel() == 0) continue;
        is_count(tensor) ? whole.put_count(key, tensor.item<int64_t>())
                         : whole.put(key, rank, tensor);
      }
    }
    return whole.take();
  } catch (const TimeoutError& error) {
    throw TimeoutError(
        what + ", rank " + std::to_string(group.rank()) +
            ": the state is spread over all ranks, and not all came: " + error.what(),
        "call it on every rank, also where only one rank saves");
  }
}

CutState cut_state(const ParameterShards& shards, const StateDict& whole,
                   const std::string& optimizer) {
  const c10::AutoGradMode no_grad(false);
  CutState cut;
  for (const auto& [text, tensor] : whole) {
    const Key key = key_of(text, shards, optimizer);
    const at::Tensor& parameter = shards.parameters()[key.index];
    const bool like = tensor.defined() && tensor.sizes() == parameter.sizes();
    if (!like && !(tensor.defined() && is_count(tensor))) {
      throw CheckpointError(optimizer + ": the optimizer state's '" + text + "' has shape " +
                                (tensor.defined() ? c10::str(tensor.sizes()) : "nothing") +
                                ", the parameter has " + c10::str(parameter.sizes()),
                            "the checkpoint is of another model or optimizer");
    }
    if (!shards.has(key.index)) {
      if (shards.group().rank() == 0) cut.frozen.emplace_back(text, tensor.detach().clone());
    } else if (shards.part(shards.group().rank(), key.index).numel() > 0) {
      cut.local.emplace_back(text, like ? shards.cut(key.index, tensor) : tensor);
    }
  }
  return cut;
}

}  // namespace lockstep::detail
