#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/backends/hierarchical/host_collectives.h"

namespace lockstep::hierarchical {

/// How tensors like this one are joined by `op` in a group of `ranks`. Throws UsageError where the
/// dtype has not that reduction.
Joining joining_of(const at::Tensor& tensor, const c10d::ReduceOp& op, int ranks);

}  // namespace lockstep::hierarchical
