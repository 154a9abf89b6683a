#include "lockstep/parallel/gradient_reducer.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/parallel/wrapped_module.h"

namespace lockstep::detail {
namespace {

/// Whether our own reducer can do all of this.
bool takes_own(const std::vector<ReducedParameter>& parameters, const DdpOptions& options) {
  if (options.find_unused_parameters || options.static_graph || options.custom_hook ||
      options.async_custom_hook || options.comm_hook != CommHook::none)
    return false;
  return std::all_of(parameters.begin(), parameters.end(), [](const ReducedParameter& parameter) {
    return !parameter.sparse_gradient && parameter.tensor.device().is_cpu() &&
           c10::isFloatingType(parameter.tensor.scalar_type());
  });
}

size_t bytes_of(double mebibytes, const char* option) {
  const double bytes = mebibytes * 1024 * 1024;
  if (!(bytes >= 1) || bytes > 1e15) {
    throw UsageError(std::string("DdpOptions::") + option + " is " + std::to_string(mebibytes) +
                     " MiB, expected more than 0");
  }
  return static_cast<size_t>(bytes);
}

}  // namespace

std::unique_ptr<GradientReducer> make_gradient_reducer(
    const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
    const DdpOptions& options) {
  return options.reducer == Reducer::automatic && takes_own(parameters, options)
             ? make_bucket_reducer(parameters, group, options)
             : make_c10d_reducer(parameters, group, options);
}

void throw_unknown_output(const std::string& type) {
  throw UsageError(
      "find_unused_parameters and static_graph must see the tensors that forward "
      "returns, and do not know where they are in a " +
          type,
      "say it, once, after the definition of that type:\n"
      "    template <> struct lockstep::OutputTensors<" +
          type + "> { template <class F> static void visit(" + type +
          "& o, F&& f) { lockstep::visit_tensors(o.FIELD, f); } };");
}

std::vector<size_t> bucket_caps(const DdpOptions& options) {
  const size_t rest = bytes_of(options.bucket_cap_mb, "bucket_cap_mb");
  return {std::min(rest, bytes_of(options.first_bucket_mb, "first_bucket_mb")), rest};
}

BucketLayout first_layout(const std::vector<at::Tensor>& parameters,
                          const std::vector<bool>& sparse, const DdpOptions& options) {
  std::vector<size_t> limits = bucket_caps(options);
  if (options.static_graph || !options.find_unused_parameters)
    limits = {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  auto layout = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, limits, sparse));
  // Backward produces gradients about in the opposite order.
  std::reverse(layout.begin(), layout.end());
  return layout;
}

BucketLayout layout_by_arrival(const std::vector<at::Tensor>& parameters,
                               const std::vector<size_t>& order, const DdpOptions& options) {
  std::vector<at::Tensor> tensors;
  for (const size_t index : order) tensors.push_back(parameters[index]);
  const std::vector<int64_t> indices(order.begin(), order.end());
  return std::get<0>(c10d::compute_bucket_assignment_by_size(
      tensors, bucket_caps(options), std::vector<bool>(parameters.size(), false), indices));
}

}  // namespace lockstep::detail
