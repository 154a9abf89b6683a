#include "lockstep/launch/binding.h"

#include <algorithm>
#include <set>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep::launch {
namespace {

/// The part of `count` things that the i-th of `parts` gets: from, to.
std::pair<int, int> share(int count, int i, int parts) {
  const auto at = [&](int part) {
    return static_cast<int>(static_cast<int64_t>(count) * part / parts);
  };
  return {at(i), at(i + 1)};
}

std::string range_text(const char* what, int from, int to, int of) {
  std::string text = std::string(what) + (to - from > 1 ? "s " : " ") + std::to_string(from);
  if (to - from > 1) text += " to " + std::to_string(to - 1);
  return text + " of " + std::to_string(of);
}

Binding by_core(const BindingRequest& request, const Topology& topology) {
  const int cores = static_cast<int>(topology.cores.size());
  if (request.local_size > cores) {
    const bool bound_before = request.allowed < request.online;
    throw UsageError("--bind-to core: " + std::to_string(request.local_size) + " ranks, but " +
                         counted(cores, "core") + " that they may use",
                     bound_before ? "a launcher, taskset or a container has bound this rank "
                                    "already: start with `mpirun --bind-to none`, or use "
                                    "--bind-to none here"
                                  : "start fewer ranks, or use --bind-to none");
  }
  const auto [from, to] = share(cores, request.local_rank, request.local_size);
  Binding binding;
  for (int i = from; i < to; ++i) {
    const auto& processors = topology.cores[static_cast<size_t>(i)].processors;
    binding.processors.insert(binding.processors.end(), processors.begin(), processors.end());
  }
  binding.reason = "core: " + range_text("core", from, to, cores);
  return binding;
}

Binding by_numa(const BindingRequest& request, const Topology& topology) {
  const int domains = topology.domains();
  auto [from, to] = share(domains, request.local_rank, request.local_size);
  to = std::max(to, from + 1);
  Binding binding;
  for (const Core& core : topology.cores) {
    if (core.numa < from || core.numa >= to) continue;
    binding.processors.insert(binding.processors.end(), core.processors.begin(),
                              core.processors.end());
  }
  binding.reason = "numa: " + range_text("domain", from, to, domains);
  return binding;
}

constexpr const char* kOneDomain = "one NUMA domain";

/// Why `auto` binds nothing; empty where it binds.
std::string why_not(const BindingRequest& request) {
  if (request.local_size == 1) return "one rank on this host";
  if (request.allowed < request.online) {
    return "only " + std::to_string(request.allowed) + " of " + std::to_string(request.online) +
           " processors may be used, which a launcher, taskset or a container has chosen";
  }
  if (request.one_domain) return kOneDomain;
  return {};
}

}  // namespace

int Topology::domains() const {
  std::set<int> known;
  for (const Core& core : cores) known.insert(core.numa);
  return static_cast<int>(known.size());
}

std::vector<std::string> binding_names() {
  return {"auto", "none", "core", "numa"};
}

Binding choose_binding(const BindingRequest& request, const Topology* topology) {
  expect_one_of("--bind-to", request.word, binding_names());
  if (request.word == "none") return {{}, "none: as asked for"};
  const bool automatic = request.word == "auto";
  if (automatic) {
    if (const auto reason = why_not(request); !reason.empty()) return {{}, "none: " + reason};
  }
  if (!topology) {
    if (automatic) return {{}, "none: " + no_topology_reason()};
    throw UsageError("--bind-to " + request.word + ": " + no_topology_reason(),
                     "install libhwloc-dev and build again, or use --bind-to none");
  }
  if (automatic && topology->domains() < 2) return {{}, std::string("none: ") + kOneDomain};
  Binding binding =
      request.word == "core" ? by_core(request, *topology) : by_numa(request, *topology);
  std::sort(binding.processors.begin(), binding.processors.end());
  return binding;
}

namespace {

void look_at_machine(BindingRequest& request) {
  request.allowed = static_cast<int>(allowed_processors().size());
  request.online = online_processors();
  request.one_domain = has_one_memory_domain();
}

std::optional<Topology> topology_for(const BindingRequest& request) {
  const bool asked = request.word == "core" || request.word == "numa";
  const bool needed = asked || (request.word == "auto" && why_not(request).empty());
  return needed ? read_topology() : std::nullopt;
}

}  // namespace

Binding choose_binding(BindingRequest request) {
  look_at_machine(request);
  const auto topology = topology_for(request);
  return choose_binding(request, topology ? &*topology : nullptr);
}

std::vector<Binding> choose_bindings(BindingRequest request) {
  look_at_machine(request);
  const auto topology = topology_for(request);
  std::vector<Binding> bindings;
  for (request.local_rank = 0; request.local_rank < request.local_size; ++request.local_rank) {
    bindings.push_back(choose_binding(request, topology ? &*topology : nullptr));
  }
  return bindings;
}

}  // namespace lockstep::launch
