#include "lockstep/parallel/gradient_reducer.h"

#include "lockstep/base/error.h"

namespace lockstep::detail {
namespace {

/// What of this our own reducer does not do; empty when it does it all.
std::string why_not_own(const std::vector<ReducedParameter>& parameters,
                        const DdpOptions& options) {
  if (options.find_unused_parameters) return "find_unused_parameters";
  if (options.static_graph) return "static_graph";
  if (options.custom_hook || options.async_custom_hook || options.comm_hook != CommHook::none)
    return "communication hooks";
  for (const ReducedParameter& parameter : parameters) {
    if (parameter.sparse_gradient) return "sparse gradients";
    if (!parameter.tensor.device().is_cpu()) return "parameters that are not on the CPU";
    if (!c10::isFloatingType(parameter.tensor.scalar_type()))
      return "parameters that are not real numbers";
  }
  return {};
}

}  // namespace

std::unique_ptr<GradientReducer> make_gradient_reducer(
    const std::vector<ReducedParameter>& parameters, const ProcessGroup& group,
    const DdpOptions& options) {
  if (options.reducer == Reducer::c10d) return make_c10d_reducer(parameters, group, options);
  const std::string reason = why_not_own(parameters, options);
  if (reason.empty()) return make_bucket_reducer(parameters, group, options);
  if (options.reducer == Reducer::automatic) return make_c10d_reducer(parameters, group, options);
  throw UsageError("DistributedDataParallel: Reducer::lockstep has no " + reason,
                   "leave DdpOptions::reducer at Reducer::automatic");
}

}  // namespace lockstep::detail
