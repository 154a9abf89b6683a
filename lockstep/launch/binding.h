#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/base/cores.h"

namespace lockstep::launch {

/// A core of the machine: the processors (hardware threads) of it that we may use.
struct Core {
  std::vector<int> processors;
  int numa = 0;  ///< Its NUMA domain, counted from 0 without gaps.
};

/// The cores that we may use, neighbours in the machine beside each other.
struct Topology {
  std::vector<Core> cores = {};  ///< By their domain.
  int online = 1;                ///< Processors that the machine has switched on, ours or not.
  int processors() const;        ///< Of the cores.
  int domains() const;
};

/// Of these processors, as the kernel shows it: one core each and one domain where it does not say.
/// Takes some 20 us for each core. `system` is for tests.
Topology read_topology(const std::vector<int>& processors = allowed_processors(),
                       const std::filesystem::path& system = "/sys/devices/system/cpu");

/// What `--bind-to` takes, in the words of mpirun: auto, none, core, numa.
std::vector<std::string> binding_names();

/// What the choice of processors depends on.
struct BindingRequest {
  std::string word = "auto";
  int local_rank = 0;
  int local_size = 1;
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
Binding choose_binding(const BindingRequest& request, const Topology& topology = read_topology());

}  // namespace lockstep::launch
