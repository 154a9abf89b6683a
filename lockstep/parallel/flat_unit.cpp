#include "lockstep/parallel/flat_unit.h"

#include <algorithm>
#include <utility>

namespace lockstep::detail {

int64_t FlatUnit::end() const {
  if (parameters.empty()) return 0;
  return parameters.back().offset + up_to_block(parameters.back().tensor.numel());
}

void FlatUnit::add(std::string parameter, const at::Tensor& tensor, size_t index) {
  parameters.push_back({std::move(parameter), tensor, index, end()});
}

void FlatUnit::cut_evenly(int ranks, int64_t spare) {
  const int64_t share = up_to_block((end() + spare + ranks - 1) / ranks);
  bounds = {0};
  for (int64_t rank = 1; rank <= ranks; ++rank) bounds.push_back(rank * share);
}

bool FlatUnit::is_even() const {
  for (size_t rank = 1; rank < bounds.size(); ++rank) {
    if (bounds[rank] != bounds[1] * static_cast<int64_t>(rank)) return false;
  }
  return true;
}

Part FlatUnit::part(int rank, const FlatParameter& parameter) const {
  const int64_t count = parameter.tensor.numel();
  const int64_t begin = std::clamp<int64_t>(begin_of(rank) - parameter.offset, 0, count);
  return {begin, std::clamp<int64_t>(begin_of(rank + 1) - parameter.offset, begin, count)};
}

std::vector<Piece> pieces_of(const std::vector<FlatUnit>& units, int rank) {
  std::vector<Piece> pieces;
  for (size_t u = 0; u < units.size(); ++u) {
    for (size_t p = 0; p < units[u].parameters.size(); ++p) {
      const FlatParameter& parameter = units[u].parameters[p];
      const Part part = units[u].part(rank, parameter);
      if (part.numel() > 0)
        pieces.push_back({u, p, part.begin, part.numel(),
                          parameter.offset + part.begin - units[u].begin_of(rank)});
    }
  }
  return pieces;
}

}  // namespace lockstep::detail
