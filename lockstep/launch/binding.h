#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lockstep::launch {

/// A core of the machine: the processors (hardware threads) of it that we may use.
struct Core {
  std::vector<int> processors;
  int numa = 0;  ///< Its NUMA domain, counted from 0 without gaps.
};

/// The cores that we may use, neighbours in the machine beside each other.
struct Topology {
  std::vector<Core> cores;
  int domains() const;  ///< Of memory.
};

/// Read with hwloc, which takes a few milliseconds. None when this build has no hwloc. See
/// `no_topology_reason`.
std::optional<Topology> read_topology();
/// Why read_topology gives none, and what to do about it. Empty when it does.
std::string no_topology_reason();

/// What `--bind-to` takes, in the words of mpirun: auto, none, core, numa.
std::vector<std::string> binding_names();

/// What the choice of processors depends on.
struct BindingRequest {
  std::string word = "auto";
  int local_rank = 0;
  int local_size = 1;
  int allowed = 1;  ///< Processors that we may use. Fewer than `online`: some were taken away.
  int online = 1;   ///< Processors that there are.
  bool one_domain = false;  ///< The kernel shows one NUMA domain: `auto` needs no topology.
};

struct Binding {
  std::vector<int> processors;  ///< Ascending; empty: not bound.
  std::string reason;           ///< "numa: domain 1 of 2"; why not, where not.
};

/// Which processors a rank of this host keeps to.
///  - core: the cores are dealt out in equal parts, neighbours together. With 2 ranks on 8 cores
///    each gets 4. Throws UsageError for more ranks than cores.
///  - numa: as many whole domains as there are for each rank. Ranks share one where there are fewer
///    domains than ranks.
///  - none: all.
///  - auto: numa where several ranks meet several domains, none otherwise. On one domain binding
///    gains nothing. A rank that has its core to itself is left there by the system. A rank that is
///    bound to a core has its helpers (loader workers, communication) there too. auto is also none
///    where somebody else, a launcher, taskset or a container, has dealt out the processors
///    already.
///
/// `topology` is null where it could not be read: then auto is none, and core and numa throw
/// UsageError.
Binding choose_binding(const BindingRequest& request, const Topology* topology);

/// The same for this machine. Reads the topology only when it is needed. `allowed`, `online` and
/// `one_domain` are filled in.
Binding choose_binding(BindingRequest request);
/// For all of this host's ranks, in their order. `local_rank` is filled in too.
std::vector<Binding> choose_bindings(BindingRequest request);

}  // namespace lockstep::launch
