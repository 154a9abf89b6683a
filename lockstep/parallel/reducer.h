#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/parallel/ddp.h"

namespace c10d {
class ProcessGroup;
class Reducer;
}  // namespace c10d

namespace lockstep::detail {

/// A parameter that gets a gradient, with what the reducer wants to know of it.
struct ReducedParameter {
  std::string name;
  at::Tensor tensor;
  bool sparse_gradient = false;
};

/// LibTorch's reducer over these parameters, with the buckets that Python's
/// DistributedDataParallel gives it, and without a hook. The only place that knows the
/// constructor's arguments, which differ between LibTorch's versions.
std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<ReducedParameter>& parameters,
                                            const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                            const DdpOptions& options);

/// Installs the options' hook, if any.
void register_hook(c10d::Reducer& reducer, const ProcessGroup& group, const DdpOptions& options);

}  // namespace lockstep::detail
