#pragma once

#include <string>

namespace lockstep {

/// Names the host that this process runs on: its name and this boot of it, and LOCKSTEP_HOST_ID
/// where that is set. The variable divides one machine into several hosts, by hand. Processes with
/// different values count as of different hosts. So jobs for several hosts can be tried on one.
std::string host_id();

/// Equal for processes that can share memory: of one host_id, one process namespace (through whose
/// /proc the memory is opened) and one user.
/// Containers have keys of their own unless they share the host's processes. Empty where the system
/// refuses memory to be shared.
std::string host_key();

}  // namespace lockstep
