#include "lockstep/launch/binding.h"

#include <algorithm>
#include <map>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
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
    const bool bound_before = topology.processors() < topology.online;
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

/// Why `auto` binds nothing; empty where it binds.
std::string why_not(const BindingRequest& request, const Topology& topology) {
  if (request.local_size == 1) return "one rank on this host";
  if (topology.processors() < topology.online) {
    return "only " + std::to_string(topology.processors()) + " of " +
           std::to_string(topology.online) +
           " processors may be used, which a launcher, taskset or a container has chosen";
  }
  return topology.domains() < 2 ? "one NUMA domain" : "";
}

/// As the kernel counts domains; 0 where it does not say.
int numa_of(int processor, const std::filesystem::path& system) {
  std::error_code none;
  const auto folder = system / ("cpu" + std::to_string(processor));
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("node")) continue;
    if (const auto number = parse_int(name.substr(4))) return static_cast<int>(*number);
  }
  return 0;
}

}  // namespace

int Topology::processors() const {
  size_t count = 0;
  for (const Core& core : cores) count += core.processors.size();
  return static_cast<int>(count);
}

int Topology::domains() const {
  return cores.empty() ? 0 : cores.back().numa + 1;
}

Topology read_topology(const std::vector<int>& processors, const std::filesystem::path& system) {
  std::map<int, std::vector<std::vector<int>>> domains;
  for (auto& core : cores_of(processors, system))
    domains[numa_of(core.front(), system)].push_back(core);
  Topology topology{.online = online_processors()};
  for (auto& [number, cores] : domains) {
    const int numa = topology.domains();
    for (auto& core : cores) topology.cores.push_back({std::move(core), numa});
  }
  return topology;
}

std::vector<std::string> binding_names() {
  return {"auto", "none", "core", "numa"};
}

Binding choose_binding(const BindingRequest& request, const Topology& topology) {
  expect_one_of("--bind-to", request.word, binding_names());
  if (request.word == "none") return {{}, "none: as asked for"};
  if (request.word == "auto") {
    if (const auto reason = why_not(request, topology); !reason.empty())
      return {{}, "none: " + reason};
  }
  Binding binding =
      request.word == "core" ? by_core(request, topology) : by_numa(request, topology);
  std::sort(binding.processors.begin(), binding.processors.end());
  return binding;
}

}  // namespace lockstep::launch
