#pragma once

#include <string>
#include <vector>

#include "lockstep/comm/backends/backend.h"

namespace lockstep {

/// Every backend that Lockstep knows, in the order in which they are preferred.
std::vector<BackendInfo> available_backends();

/// What `available_backends` says of one. Throws UsageError for an unknown name, with the nearest.
BackendInfo backend_info(const std::string& name);

/// Forms the group: blocks until all ranks have come. Throws UsageError for an unknown or absent
/// backend (why, and what to do). Throws LibTorch's errors for what goes wrong while connecting.
/// Before it is released its `shutdown` must be called, or `abort` to give up what is in flight.
/// For NCCL every rank does so in the same order and before `main` ends.
MadeBackend make_backend(const std::string& name, const BackendOptions& options);

}  // namespace lockstep
