#include "lockstep/parallel/fsdp/flat_unit.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_map>

namespace lockstep::detail {
namespace {

int64_t up_to_block(int64_t elements) {
  return (elements + kShardBlock - 1) / kShardBlock * kShardBlock;
}

}  // namespace

std::vector<FlatUnit> lay_out(const std::vector<PlannedUnit>& planned,
                              const torch::nn::Module& module, int ranks) {
  // LibTorch lists a tied parameter once for each of its names.
  std::unordered_map<const c10::TensorImpl*, size_t> indices;
  for (const at::Tensor& parameter : module.parameters())
    indices.emplace(parameter.unsafeGetTensorImpl(), indices.size());
  std::vector<FlatUnit> units;
  for (const PlannedUnit& plan : planned) {
    const size_t first = units.size();
    for (const NamedTensor& item : plan.parameters) {
      const at::ScalarType dtype = item.tensor.scalar_type();
      auto unit = std::find_if(units.begin() + static_cast<std::ptrdiff_t>(first), units.end(),
                               [&](const FlatUnit& made) { return made.dtype == dtype; });
      if (unit == units.end()) unit = units.insert(units.end(), {plan.name, dtype, {}, 0});
      // Until all are there, it counts the unit's elements.
      unit->parameters.push_back({item.name, item.tensor,
                                  indices.at(item.tensor.unsafeGetTensorImpl()), unit->shard_size});
      unit->shard_size += up_to_block(item.tensor.numel());
    }
  }
  for (FlatUnit& unit : units) unit.shard_size = up_to_block(unit.shard_size / ranks + 1);
  return units;
}

std::vector<Piece> pieces_of(const std::vector<FlatUnit>& units, int rank) {
  std::vector<Piece> pieces;
  for (size_t u = 0; u < units.size(); ++u) {
    const int64_t begin = rank * units[u].shard_size, end = begin + units[u].shard_size;
    for (size_t p = 0; p < units[u].parameters.size(); ++p) {
      const FlatParameter& parameter = units[u].parameters[p];
      const int64_t from = std::max(begin, parameter.offset);
      const int64_t to = std::min(end, parameter.offset + parameter.tensor.numel());
      if (from < to) pieces.push_back({u, p, from - parameter.offset, to - from, from - begin});
    }
  }
  return pieces;
}

}  // namespace lockstep::detail
