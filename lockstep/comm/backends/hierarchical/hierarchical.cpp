#include "lockstep/comm/backends/hierarchical/hierarchical.h"

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/hierarchical/hierarchical_backend.h"
#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/shared_memory/host_place.h"

namespace lockstep::hierarchical {

BackendInfo info() {
  BackendInfo info = shm::info();
  info.name = "hierarchical";
  return info;
}

std::string place_of(const BackendOptions& options) {
  const std::string place = shared_memory_place();
  return options.host.empty() || place.empty() ? place : place + "/" + options.host;
}

std::string between_hosts() {
  const std::string name = env_string("LOCKSTEP_HOSTS_BACKEND").value_or("gloo");
  if (name == "hierarchical" || name == "shm" || name == "nccl") {
    throw UsageError("environment variable LOCKSTEP_HOSTS_BACKEND='" + name +
                         "': it does not join CPU tensors between hosts",
                     "leave it unset for gloo; for CUDA tensors use --backend nccl, which knows "
                     "hosts by itself");
  }
  if (name != "gloo" && name != "mpi") {
    throw UsageError("environment variable LOCKSTEP_HOSTS_BACKEND: " +
                     unknown_word("backend", name, {"gloo", "mpi"}));
  }
  return name;
}

c10::intrusive_ptr<c10d::Backend> make(const BackendOptions& options) {
  const auto members = meet(options);
  std::vector<std::string> places;
  for (const auto& member : members) places.push_back(member.place);
  const HostLayout layout = HostLayout::of(places, options.rank);
  if (layout.one_host()) return shm::make(options);
  if (layout.one_rank_a_host()) return options.factory(between_hosts(), options);
  return c10::make_intrusive<HierarchicalBackend>(options, layout, members);
}

}  // namespace lockstep::hierarchical
