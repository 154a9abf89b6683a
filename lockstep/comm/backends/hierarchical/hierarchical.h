#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::hierarchical {

inline constexpr BackendTraits kTraits{.takes_strided = true,
                                       .runs_in_caller = true,
                                       .names_failures = true,
                                       .tells_only_waiters = true,
                                       .connects_one_by_one = true};

BackendInfo info();
/// A backend for ranks on several hosts, some of them on one: see HierarchicalBackend. Where all
/// ranks share a host it is the backend shm itself. Where each has a host of its own it is the
/// backend gloo.
MadeBackend make(const BackendOptions& options);
/// This rank's host_key, and BackendOptions::host.
std::string host_key_of(const BackendOptions& options);

}  // namespace lockstep::hierarchical
