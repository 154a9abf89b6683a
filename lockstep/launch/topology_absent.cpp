#include "lockstep/launch/binding.h"

// In place of topology_hwloc.cpp where hwloc was not found when Lockstep was configured.

namespace lockstep::launch {

std::string no_topology_reason() {
  return "this build cannot tell which processors lie together: hwloc was not found when Lockstep "
         "was configured";
}

std::optional<Topology> read_topology() {
  return std::nullopt;
}

}  // namespace lockstep::launch
