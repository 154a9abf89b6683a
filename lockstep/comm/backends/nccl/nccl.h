#pragma once

#include "lockstep/comm/backends/backend.h"

/// nccl.cpp implements these where LibTorch has CUDA and the toolkit's and NCCL's headers were
/// found when Lockstep was configured, nccl_absent.cpp everywhere else.
namespace lockstep::nccl {

inline constexpr BackendTraits kTraits{.on_cuda = true};

BackendInfo info();
MadeBackend make(const BackendOptions& options);

}  // namespace lockstep::nccl
