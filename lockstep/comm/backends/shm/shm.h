#pragma once

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/shared_memory/reduction_kernels.h"

namespace lockstep::shm {

inline constexpr BackendTraits kTraits{
    .takes_strided = true, .runs_in_caller = true, .names_failures = true};

BackendInfo info();
/// A backend for ranks on one host that meets them through `options.store`. CPU tensors of every
/// dtype that LibTorch's collectives know, contiguous or not. Collectives run in the calling thread
/// when the others come within the time that a hand-over to another thread would cost. Else they
/// run on a thread of the group's own. Their order is that of the calls. Throws what SharedGroup
/// throws.
MadeBackend make(const BackendOptions& options);

/// Throws UsageError for a dtype that shared memory does not reduce. That the dtype has such a
/// reduction is checked before (backends::check_reduction).
ReduceKernel kernel_for(at::ScalarType type, const c10d::ReduceOp& op);

}  // namespace lockstep::shm
