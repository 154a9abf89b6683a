#include "lockstep/comm/backends/hierarchical/hierarchical.h"

#include "lockstep/comm/backends/gloo/gloo.h"
#include "lockstep/comm/backends/hierarchical/hierarchical_backend.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/shared_memory/host_key.h"

namespace lockstep::hierarchical {

BackendInfo info() {
  BackendInfo info = shm::info();
  info.name = "hierarchical";
  info.traits = kTraits;
  return info;
}

std::string host_key_of(const BackendOptions& options) {
  const std::string key = host_key();
  return options.host.empty() || key.empty() ? key : key + "/" + options.host;
}

MadeBackend make(const BackendOptions& options) {
  const auto members = meet(options);
  std::vector<std::string> host_keys;
  for (const auto& member : members) host_keys.push_back(member.host_key);
  const HostLayout layout = HostLayout::of(host_keys, options.rank);
  if (layout.one_host()) return shm::make(options);
  if (layout.one_rank_a_host()) return gloo::make(options);
  return {c10::make_intrusive<HierarchicalBackend>(options, layout, members), kTraits};
}

}  // namespace lockstep::hierarchical
