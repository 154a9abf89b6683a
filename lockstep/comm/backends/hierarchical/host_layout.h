#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace lockstep::hierarchical {

/// Which ranks of a group share a host, as one of them sees it.
struct HostLayout {
  /// The group's ranks by host, ascending. Hosts are in the order of their lowest ranks. The first
  /// rank of a host is its leader.
  std::vector<std::vector<int>> hosts;
  std::vector<int> host_of;  ///< By rank.
  int host = 0;              ///< This rank's.
  int local = 0;             ///< This rank's index within it.

  /// `host_keys[r]`: of rank r; equal where ranks can share memory.
  static HostLayout of(const std::vector<std::string>& host_keys, int rank);

  const std::vector<int>& mine() const { return hosts[static_cast<size_t>(host)]; }
  int rank() const { return mine()[static_cast<size_t>(local)]; }
  bool leads() const { return local == 0; }
  bool one_host() const { return hosts.size() == 1; }
  bool one_rank_a_host() const {
    return std::ranges::all_of(hosts, [](const auto& ranks) { return ranks.size() == 1; });
  }
  std::vector<int> leaders() const;
  /// Ranks of all hosts.
  size_t size() const { return host_of.size(); }
  /// The index of a rank within its host.
  int local_of(int rank) const;
};

template <class Visit>
void each_other_host(const HostLayout& layout, Visit visit) {
  for (size_t host = 0; host < layout.hosts.size(); ++host)
    if (static_cast<int>(host) != layout.host) visit(host);
}

/// Which backend joins ranks of these host keys on the CPU: "shm", "hierarchical", or "gloo" where
/// shared memory would join no two of them.
std::string backend_for(const std::vector<std::string>& host_keys);

}  // namespace lockstep::hierarchical
