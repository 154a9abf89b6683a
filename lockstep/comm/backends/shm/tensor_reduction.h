#pragma once

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/shared_memory/reduction_kernels.h"

namespace lockstep::shm {

/// LibTorch's names in ours. Throws UsageError for what shared memory does not reduce.
DataType data_type(at::ScalarType type);
Reduction reduction_kind(const c10d::ReduceOp& op);
/// Throws UsageError for a reduction that the dtype does not have.
ReduceKernel kernel_for(at::ScalarType type, const c10d::ReduceOp& op);

}  // namespace lockstep::shm
