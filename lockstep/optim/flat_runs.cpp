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

}  // namespace lockstep
