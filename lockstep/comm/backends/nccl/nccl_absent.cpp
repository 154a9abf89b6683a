#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/nccl/nccl.h"

namespace lockstep::nccl {

// The build system says what was missing when this build was configured.
BackendInfo info() {
  return {"nccl", false, LOCKSTEP_NCCL_ABSENT_REASON, LOCKSTEP_NCCL_ABSENT_REMEDY, kTraits};
}

MadeBackend make(const BackendOptions& options) {
  throw UsageError("backend 'nccl' cannot be used: " LOCKSTEP_NCCL_ABSENT_REASON,
                   LOCKSTEP_NCCL_ABSENT_REMEDY);
}

}  // namespace lockstep::nccl
