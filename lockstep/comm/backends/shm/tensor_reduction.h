#pragma once

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/shared_memory/reduction_kernels.h"

namespace lockstep::shm {

/// Throws UsageError for a dtype that shared memory does not reduce. That the dtype has such a
/// reduction is checked before (backends::check_reduction).
ReduceKernel kernel_for(at::ScalarType type, const c10d::ReduceOp& op);

}  // namespace lockstep::shm
