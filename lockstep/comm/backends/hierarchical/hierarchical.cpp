#include "lockstep/comm/backends/hierarchical/hierarchical.h"

#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/hierarchical/hierarchical_backend.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/shared_memory/host_place.h"

namespace lockstep::hierarchical {

BackendInfo info() {
  BackendInfo info = shm::info();
  info.name = "hierarchical";
  info.traits = kTraits;
  return info;
}

std::string place_of(const BackendOptions& options) {
  const std::string place = shared_memory_place();
  return options.host.empty() || place.empty() ? place : place + "/" + options.host;
}

MadeBackend make(const BackendOptions& options) {
  const auto members = meet(options);
  std::vector<std::string> places;
  for (const auto& member : members) places.push_back(member.place);
  const HostLayout layout = HostLayout::of(places, options.rank);
  if (layout.one_host()) return shm::make(options);
  if (layout.one_rank_a_host()) return gloo::make(options);
  return {c10::make_intrusive<HierarchicalBackend>(options, layout, members), kTraits};
}

}  // namespace lockstep::hierarchical
