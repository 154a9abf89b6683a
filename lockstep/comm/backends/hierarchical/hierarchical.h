#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::hierarchical {

BackendInfo info();
/// A backend for ranks on several hosts, some of them on one: see HierarchicalBackend. Where all
/// ranks share a host it is the backend shm itself, and where each has a host of its own the one
/// between hosts.
c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options);

/// Where this rank runs: shared_memory_place, unless the options say it.
std::string place_of(const BackendOptions& options);
/// The backend by which the leaders of hosts talk: LOCKSTEP_HOSTS_BACKEND, else gloo. It needs send
/// and receive of CPU tensors. Throws UsageError for one that has not.
c10::intrusive_ptr<c10d::Backend> make_between_hosts(const BackendOptions& options);

}  // namespace lockstep::hierarchical
