#include "lockstep/comm/checks/shared_elements.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <string>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

/// From the first byte to behind the last one. Empty where there are none.
struct Extent {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  explicit Extent(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) return;
    begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    if (!begin) return;
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    end = begin + static_cast<size_t>(last + 1) * tensor.element_size();
  }
  bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

}  // namespace

at::Tensor apart_from(c10::ArrayRef<at::Tensor> outputs, const at::Tensor& input,
                      const void* in_place) {
  const Extent given(input);
  const bool stays = given.begin && given.begin == in_place && input.is_contiguous();
  if (stays || std::ranges::none_of(
                   outputs, [&](const at::Tensor& output) { return given.meets(Extent(output)); }))
    return input;
  const at::AutoDispatchBelowADInplaceOrView outside_autograd;
  return input.clone(at::MemoryFormat::Contiguous);
}

std::vector<at::Tensor> apart_from(c10::ArrayRef<at::Tensor> outputs,
                                   c10::ArrayRef<at::Tensor> inputs, const void* in_place) {
  std::vector<at::Tensor> apart;
  apart.reserve(inputs.size());
  for (const auto& input : inputs) apart.push_back(apart_from(outputs, input, in_place));
  return apart;
}

void expect_apart(Operation operation, c10::ArrayRef<at::Tensor> results) {
  if (results.size() < 2) return;
  std::vector<std::pair<Extent, size_t>> dense;
  for (size_t i = 0; i < results.size(); ++i) {
    const Extent extent(results[i]);
    if (extent.end && results[i].is_non_overlapping_and_dense()) dense.emplace_back(extent, i);
  }
  std::ranges::sort(dense, {}, [](const auto& one) { return one.first.begin; });
  for (size_t i = 1; i < dense.size(); ++i) {
    if (!dense[i - 1].first.meets(dense[i].first)) continue;
    const auto [first, second] = std::minmax(dense[i - 1].second, dense[i].second);
    throw UsageError(std::string(operation_name(operation)) + ": the results " +
                         std::to_string(first) + " and " + std::to_string(second) +
                         " of the list share memory",
                     "give each its own tensor: std::vector(n, tensor) holds one tensor n times");
  }
}

}  // namespace lockstep
