#include "lockstep/parallel/reducer.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <unordered_map>

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

int64_t bytes_of(double mebibytes, const char* option) {
  const double bytes = mebibytes * 1024 * 1024;
  if (!(bytes >= 1) || bytes > 1e15) {
    throw UsageError(std::string("DdpOptions::") + option + " is " + std::to_string(mebibytes) +
                     " MiB, expected more than 0");
  }
  return static_cast<int64_t>(bytes);
}

/// One bucket for the first step, unless parameters may go unused: the true order of gradients is
/// known only after it, and a bucket started early could then cross other collectives of backward.
std::vector<size_t> first_limits(const DdpOptions& options, int64_t first_cap, int64_t cap) {
  if (options.static_graph || !options.find_unused_parameters) {
    return {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  }
  if (first_cap < cap) return {static_cast<size_t>(first_cap), static_cast<size_t>(cap)};
  return {static_cast<size_t>(cap)};
}

/// The Reducer's constructor has grown: some releases of LibTorch want the caps of single buckets
/// after the other arguments.
template <class Reducer, class... Args>
std::unique_ptr<Reducer> construct(Args&&... args) {
  if constexpr (std::is_constructible_v<Reducer, Args...>) {
    return std::make_unique<Reducer>(std::forward<Args>(args)...);
  } else {
    return std::make_unique<Reducer>(std::forward<Args>(args)..., std::vector<int64_t>{});
  }
}

}  // namespace

std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<ReducedParameter>& parameters,
                                            const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                            const DdpOptions& options) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> sparse;
  std::unordered_map<size_t, std::string> names;
  for (const ReducedParameter& parameter : parameters) {
    names[tensors.size()] = parameter.name;
    tensors.push_back(parameter.tensor);
    sparse.push_back(parameter.sparse_gradient);
  }
  const int64_t cap = bytes_of(options.bucket_cap_mb, "bucket_cap_mb");
  const int64_t first_cap = std::min(cap, bytes_of(options.first_bucket_mb, "first_bucket_mb"));
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      tensors, first_limits(options, first_cap, cap), sparse));
  // Backward produces gradients about in the opposite order.
  std::reverse(buckets.begin(), buckets.end());
  const bool skip_unused = false, python_reducer = false;
  return construct<c10d::Reducer>(std::move(tensors), std::move(buckets), group, std::move(sparse),
                                  cap, options.find_unused_parameters,
                                  options.gradient_as_bucket_view, std::move(names), first_cap,
                                  skip_unused, python_reducer);
}

}  // namespace lockstep::detail
