#pragma once

#include "lockstep/comm/backends/backend.h"

namespace lockstep::hierarchical {

BackendInfo info();
/// A backend for ranks on several hosts, some of them on one: see HierarchicalBackend. Where all
/// ranks share a host it is the backend shm itself, and where each has a host of its own the one
/// between hosts. `factory` makes what is between hosts.
c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options);

/// Where this rank runs: shared_memory_place, unless the options say it.
std::string place_of(const BackendOptions& options);
/// By what the leaders of hosts talk: LOCKSTEP_HOSTS_BACKEND, else gloo. Throws UsageError for one
/// that does not join CPU tensors of several hosts.
std::string between_hosts();

}  // namespace lockstep::hierarchical
