#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::nccl {

inline constexpr BackendTraits kTraits{.on_cuda = true};

BackendInfo info();
MadeBackend make(const BackendOptions& options);

}  // namespace lockstep::nccl
