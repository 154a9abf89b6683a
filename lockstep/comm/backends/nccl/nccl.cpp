#include "lockstep/comm/backends/nccl/nccl.h"

#ifdef LOCKSTEP_NCCL_ABSENT_REASON  // What was missing when this build was configured.

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep::nccl {

BackendInfo info() {
  return {"nccl", false, LOCKSTEP_NCCL_ABSENT_REASON, LOCKSTEP_NCCL_ABSENT_REMEDY, kTraits};
}

MadeBackend make(const BackendOptions&) {
  return {};  // Nobody asks for what is not available.
}

}  // namespace lockstep::nccl

#else

#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "lockstep/base/error.h"

namespace lockstep::nccl {

BackendInfo info() {
  if (at::detail::getCUDAHooks().deviceCount() > 0) return {"nccl", true, {}, {}, kTraits};
  return {"nccl", false, "no CUDA device is visible to this process",
          "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --backend gloo", kTraits};
}

MadeBackend make(const BackendOptions& options) {
  if (!options.device.is_cuda() || !options.device.has_index()) {
    throw UsageError("backend 'nccl' needs a CUDA device of its own for each rank");
  }
  const int count = at::detail::getCUDAHooks().deviceCount();
  if (options.device.index() >= count) {
    throw UsageError("backend 'nccl': rank " + std::to_string(options.rank) + " would use " +
                         options.device.str() + ", but this host shows " + std::to_string(count) +
                         " CUDA device(s)",
                     "start at most one rank a device, or use --backend gloo");
  }
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  nccl->group_name = options.group_name;
  nccl->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(options.store, options.rank,
                                                             options.size, std::move(nccl));
  backend->setBoundDeviceId(options.device);
  // NCCL connects at its first collective otherwise, and a missing rank would be noticed only then.
  backend->eagerConnectSingleDevice(options.device);
  return {std::move(backend), kTraits};
}

}  // namespace lockstep::nccl

#endif
