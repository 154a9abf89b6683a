#include "lockstep/optim/dense_layout.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <tuple>

namespace lockstep {
namespace {

/// Where a dense tensor lies.
struct Place {
  const void* storage;
  int64_t offset;  ///< In elements.
  const at::Tensor* tensor;
  int64_t end() const { return offset + tensor->numel(); }
};

bool follows(const Place& next, const Place& before) {
  return next.storage == before.storage && next.offset == before.end() &&
         next.tensor->scalar_type() == before.tensor->scalar_type();
}

}  // namespace

std::vector<at::Tensor> flat_runs(const std::vector<at::Tensor>& tensors) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> result;
  std::vector<Place> places;
  for (const at::Tensor& tensor : tensors) {
    if (is_dense(tensor) && tensor.has_storage()) {
      places.push_back({tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), &tensor});
    } else {
      result.push_back(tensor);
    }
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::tie(a.storage, a.offset) < std::tie(b.storage, b.offset);
  });
  for (size_t first = 0; first < places.size();) {
    size_t last = first;
    while (last + 1 < places.size() && follows(places[last + 1], places[last])) ++last;
    const at::Tensor& start = *places[first].tensor;
    result.push_back(first == last ? start
                                   : head(start, places[last].end() - places[first].offset));
    first = last + 1;
  }
  return result;
}

std::vector<std::vector<size_t>> by_kind(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<size_t>> kinds;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const std::vector<size_t>& other) {
      const at::Tensor& first = tensors[other.front()];
      return first.dtype() == tensors[i].dtype() && first.device() == tensors[i].device();
    });
    if (kind == kinds.end()) kind = kinds.emplace(kinds.end());
    kind->push_back(i);
  }
  return kinds;
}

FlatViews flat_views(const std::vector<at::Tensor>& tensors, const MakeFlat& make) {
  FlatViews flat;
  flat.views.resize(tensors.size());
  for (const auto& members : by_kind(tensors)) {
    int64_t elements = 0;
    for (const size_t i : members) elements += tensors[i].numel();
    const auto options = tensors[members.front()].options().requires_grad(false);
    const at::Tensor& memory = flat.memory.emplace_back(make(elements, options));
    for (int64_t at = 0; const size_t i : members) {
      flat.views[i] = view_like(memory, at, tensors[i]);
      at += tensors[i].numel();
    }
  }
  return flat;
}

}  // namespace lockstep
