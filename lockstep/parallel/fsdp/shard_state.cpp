#include "lockstep/parallel/fsdp/shard_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/parallel/state_dict.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::json;

/// "exp_avg.3" is field "exp_avg" of parameter 3.
struct Key {
  std::string field;
  size_t index = 0;
};

Key parse_key(const std::string& text, const std::string& source) {
  const size_t dot = text.rfind('.');
  const std::string digits = dot == std::string::npos ? "" : text.substr(dot + 1);
  if (digits.empty() || digits.size() > 9 ||
      digits.find_first_not_of("0123456789") != std::string::npos)
    throw CheckpointError(source + " has an entry '" + text + "', expected NAME.parameter-index",
                          "it is not an optimizer's state");
  return {text.substr(0, dot), static_cast<size_t>(std::stoul(digits))};
}

/// Counts are whole numbers, of one element. All else is like the parameter.
bool is_count(const at::Tensor& tensor) {
  return tensor.numel() == 1 && !at::isFloatingType(tensor.scalar_type());
}

/// All ranks' `shard` of a unit, one after the other, on rank 0; undefined on the others.
at::Tensor gather_unit(const ProcessGroup& group, const at::Tensor& shard) {
  const int64_t size = shard.numel();
  if (group.rank() != 0) {
    std::vector<at::Tensor> none;
    group.gather(none, shard, 0);
    return {};
  }
  at::Tensor whole = at::empty({size * group.size()}, shard.options());
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank)
    parts.push_back(whole.narrow(0, rank * size, size));
  group.gather(parts, shard, 0);
  return whole;
}

/// A parameter's values out of a whole unit, in its shape and strides.
at::Tensor parameter_in(const at::Tensor& whole, const FlatParameter& parameter) {
  return view_in(whole, parameter.offset, parameter.tensor).clone(at::MemoryFormat::Preserve);
}

}  // namespace

StateDict gather_model_state(const torch::nn::Module& module, const ShardedParameters& parameters) {
  const c10::AutoGradMode no_grad(false);
  const bool is_first = parameters.group().rank() == 0;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> values;
  for (size_t u = 0; u < parameters.units().size(); ++u) {
    const at::Tensor whole = gather_unit(parameters.group(), parameters.shard(u));
    if (!is_first) continue;
    for (const FlatParameter& parameter : parameters.units()[u].parameters)
      values[parameter.tensor.unsafeGetTensorImpl()] = parameter_in(whole, parameter).cpu();
  }
  StateDict state;
  if (!is_first) return state;
  for (const auto& [name, tensor] : state_dict(module)) {
    const auto found = values.find(tensor.unsafeGetTensorImpl());
    state.emplace_back(name, found != values.end() ? found->second : tensor.detach());
  }
  return state;
}

void load_model_state(torch::nn::Module& module, const ShardedParameters& parameters,
                      const StateDict& state, const std::string& source) {
  const c10::AutoGradMode no_grad(false);
  StateDict own = state_dict(module);
  check_state_dict(module, state, source);
  const std::map<std::string, at::Tensor> given(state.begin(), state.end());
  std::unordered_map<const c10::TensorImpl*, at::Tensor> values;
  for (const auto& [name, tensor] : own) values[tensor.unsafeGetTensorImpl()] = given.at(name);
  for (const Piece& piece : parameters.pieces()) {
    const at::Tensor& tensor = parameters.parameter_of(piece).tensor;
    parameters.shard(piece.unit)
        .narrow(0, piece.shard_offset, piece.size)
        .copy_(in_flat_order(values.at(tensor.unsafeGetTensorImpl()), tensor)
                   .narrow(0, piece.begin, piece.size));
  }
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters)
      values.erase(parameter.tensor.unsafeGetTensorImpl());
  }
  for (auto& [name, tensor] : own) {
    if (values.contains(tensor.unsafeGetTensorImpl())) tensor.copy_(given.at(name));
  }
}

std::vector<Shard> shards_of(const torch::nn::Module& module, const ShardedParameters& parameters) {
  std::vector<Shard> shards;
  std::unordered_map<const c10::TensorImpl*, std::vector<const Piece*>> pieces;
  std::unordered_set<const c10::TensorImpl*> sharded;
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters)
      sharded.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  for (const Piece& piece : parameters.pieces())
    pieces[parameters.parameter_of(piece).tensor.unsafeGetTensorImpl()].push_back(&piece);
  for (const auto& [name, tensor] : state_dict(module)) {
    const auto* const impl = tensor.unsafeGetTensorImpl();
    for (const Piece* piece : pieces[impl])
      shards.push_back({name, tensor.sizes().vec(), piece->begin,
                        parameters.shard(piece->unit).narrow(0, piece->shard_offset, piece->size)});
    if (!sharded.contains(impl) && parameters.group().rank() == 0)
      shards.push_back({name, tensor.sizes().vec(), 0, in_flat_order(tensor.detach(), tensor)});
  }
  return shards;
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
  std::unordered_set<const c10::TensorImpl*> sharded;
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  StateDict own = state_dict(module);
  for (const auto& [name, tensor] : own) names.emplace(tensor.unsafeGetTensorImpl(), name);
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters)
      sharded.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  for (const Piece& piece : parameters.pieces()) {
    const at::Tensor& tensor = parameters.parameter_of(piece).tensor;
    fill(names.at(tensor.unsafeGetTensorImpl()), tensor, piece.begin,
         parameters.shard(piece.unit).narrow(0, piece.shard_offset, piece.size));
  }
  for (auto& [name, tensor] : own) {
    if (sharded.contains(tensor.unsafeGetTensorImpl())) continue;
    const at::Tensor values = at::empty({tensor.numel()}, tensor.options());
    fill(name, tensor, 0, values);
    tensor.copy_(view_in(values, 0, tensor));
  }
}

StateDict gather_optimizer_state(const ShardedParameters& parameters,
                                 const std::vector<PiecesState>& own) {
  const c10::AutoGradMode no_grad(false);
  const ProcessGroup& group = parameters.group();
  // What there is: of each parameter its fields in order, with a dtype, or the value of a count.
  std::vector<OptimizedPiece> pieces;
  std::map<size_t, std::map<std::string, at::Tensor>> mine;
  std::map<size_t, Json> described;
  for (const PiecesState& part : own) {
    // A rank without parameters has an optimizer of one tensor without elements.
    if (part.pieces.empty()) continue;
    for (const auto& [name, tensor] : part.state) {
      const Key key = parse_key(name, "the optimizer's state");
      const size_t index = part.pieces.at(key.index).parameter_index;
      mine[index][key.field] = tensor;
      described.try_emplace(index, Json::array())
          .first->second.push_back(
              is_count(tensor) ? Json{key.field, "count", tensor.item<int64_t>()}
                               : Json{key.field, "tensor", static_cast<int>(tensor.scalar_type())});
    }
    pieces.insert(pieces.end(), part.pieces.begin(), part.pieces.end());
  }
  std::map<size_t, Json> all;
  Json objects = Json::array();
  for (const auto& [index, fields] : described) objects.push_back({index, fields});
  for (const Json& of_rank : group.all_gather_object(objects)) {
    for (const Json& entry : of_rank) all.try_emplace(entry[0].get<size_t>(), entry[1]);
  }
  // One gather per unit and field.
  std::map<std::pair<size_t, std::string>, at::Tensor> gathered;
  StateDict state;
  std::map<size_t, StateDict> by_index;
  for (size_t u = 0; u < parameters.units().size(); ++u) {
    const FlatUnit& unit = parameters.units()[u];
    std::map<std::string, at::ScalarType> fields;
    for (const FlatParameter& parameter : unit.parameters) {
      const auto found = all.find(parameter.index);
      if (found == all.end()) continue;
      for (const Json& field : found->second) {
        if (field[1] == "tensor")
          fields.emplace(field[0].get<std::string>(),
                         static_cast<at::ScalarType>(field[2].get<int>()));
      }
    }
    for (const auto& [field, dtype] : fields) {
      at::Tensor shard = at::zeros({unit.shard_size}, parameters.shard(u).options().dtype(dtype));
      for (const OptimizedPiece& optimized : pieces) {
        const Piece& piece = optimized.piece;
        if (piece.unit != u) continue;
        const auto its = mine[optimized.parameter_index].find(field);
        if (its == mine[optimized.parameter_index].end()) continue;
        shard.narrow(0, piece.shard_offset, piece.size).copy_(its->second.reshape({-1}));
      }
      gathered[{u, field}] = gather_unit(group, shard);
    }
    if (group.rank() != 0) continue;
    for (const FlatParameter& parameter : unit.parameters) {
      const auto found = all.find(parameter.index);
      if (found == all.end()) continue;
      for (const Json& field : found->second) {
        const auto name = field[0].get<std::string>();
        const std::string key = name + "." + std::to_string(parameter.index);
        by_index[parameter.index].emplace_back(
            key, field[1] == "count" ? at::zeros({1}, at::kLong).fill_(field[2].get<int64_t>())
                                     : parameter_in(gathered.at({u, name}), parameter).cpu());
      }
    }
  }
  for (auto& [index, entries] : by_index) {
    for (auto& entry : entries) state.push_back(std::move(entry));
  }
  return state;
}

StateDict own_optimizer_state(const ShardedParameters& parameters,
                              const std::vector<OptimizedPiece>& pieces, const StateDict& whole,
                              const std::string& source) {
  const c10::AutoGradMode no_grad(false);
  std::map<size_t, const FlatParameter*> known;
  for (const FlatUnit& unit : parameters.units()) {
    for (const FlatParameter& parameter : unit.parameters)
      known.emplace(parameter.index, &parameter);
  }
  StateDict own;
  for (const auto& [name, tensor] : whole) {
    const Key key = parse_key(name, source);
    const auto found = known.find(key.index);
    if (found == known.end())
      throw CheckpointError(source + " has '" + name + "', but the module has no such parameter",
                            "it is of another model");
    const FlatParameter& parameter = *found->second;
    const bool count = is_count(tensor);
    if (!count && tensor.sizes() != parameter.tensor.sizes())
      throw CheckpointError(source + ": '" + name + "' is " + c10::str(tensor.sizes()) +
                                ", expected " + c10::str(parameter.tensor.sizes()) + " as " +
                                parameter.name,
                            "it is of another model");
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].parameter_index != key.index) continue;
      const Piece& piece = pieces[i].piece;
      own.emplace_back(
          key.field + "." + std::to_string(i),
          count ? tensor
                : in_flat_order(tensor, parameter.tensor).narrow(0, piece.begin, piece.size));
    }
  }
  return own;
}

}  // namespace lockstep::detail
