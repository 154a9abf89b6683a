#pragma once

#include "lockstep/comm/backends/backend.h"

/// nccl.cpp implements these where LibTorch has CUDA and the toolkit's and NCCL's headers were
/// found when Lockstep was configured, nccl_absent.cpp everywhere else.
namespace lockstep::nccl {

BackendInfo info();
c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options);

}  // namespace lockstep::nccl
