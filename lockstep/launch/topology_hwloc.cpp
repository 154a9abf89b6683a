#include <hwloc.h>

#include <map>
#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/launch/binding.h"

namespace lockstep::launch {
namespace {

struct Destroy {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Handle = std::unique_ptr<hwloc_topology, Destroy>;

/// hwloc leaves out what we may not use, so what it shows is ours.
Handle load() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) throw SystemError("hwloc cannot be started", errno);
  Handle topology(raw);
  if (hwloc_topology_load(raw) != 0) throw SystemError("hwloc cannot read the topology", errno);
  return topology;
}

std::vector<int> members(hwloc_const_cpuset_t set) {
  std::vector<int> numbers;
  for (int i = hwloc_bitmap_first(set); i >= 0; i = hwloc_bitmap_next(set, i)) {
    numbers.push_back(i);
  }
  return numbers;
}

}  // namespace

std::string no_topology_reason() {
  return {};
}

std::optional<Topology> read_topology() {
  const Handle handle = load();
  // hwloc's allowed set is the cgroup's; the thread's own mask may be narrower.
  std::unique_ptr<hwloc_bitmap_s, void (*)(hwloc_bitmap_t)> own(hwloc_bitmap_alloc(),
                                                                hwloc_bitmap_free);
  if (hwloc_get_cpubind(handle.get(), own.get(), HWLOC_CPUBIND_THREAD) != 0) {
    hwloc_bitmap_copy(own.get(), hwloc_topology_get_allowed_cpuset(handle.get()));
  }
  Topology topology;
  std::map<int, int> domains;  // hwloc's number of a domain and ours.
  const int count = hwloc_get_nbobjs_by_type(handle.get(), HWLOC_OBJ_CORE);
  const auto type = count > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  hwloc_obj_t object = nullptr;
  while ((object = hwloc_get_next_obj_by_type(handle.get(), type, object)) != nullptr) {
    std::unique_ptr<hwloc_bitmap_s, void (*)(hwloc_bitmap_t)> mine(hwloc_bitmap_dup(object->cpuset),
                                                                   hwloc_bitmap_free);
    hwloc_bitmap_and(mine.get(), mine.get(), own.get());
    Core core;
    core.processors = members(mine.get());
    if (core.processors.empty()) continue;
    const int number = object->nodeset ? hwloc_bitmap_first(object->nodeset) : 0;
    core.numa = domains.try_emplace(number, static_cast<int>(domains.size())).first->second;
    topology.cores.push_back(std::move(core));
  }
  return topology;
}

}  // namespace lockstep::launch
