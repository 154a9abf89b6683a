#include "lockstep/comm/backends/hierarchical/host_layout.h"

#include <algorithm>
#include <map>

namespace lockstep::hierarchical {

HostLayout HostLayout::of(const std::vector<std::string>& host_keys, int rank) {
  HostLayout layout;
  std::map<std::string, size_t> known;
  for (int other = 0; other < static_cast<int>(host_keys.size()); ++other) {
    const std::string& key = host_keys[static_cast<size_t>(other)];
    const auto [entry, first] = known.emplace(key, layout.hosts.size());
    const bool alone = first || key.empty();
    if (alone) layout.hosts.emplace_back();
    const size_t host = alone ? layout.hosts.size() - 1 : entry->second;
    if (other == rank) {
      layout.host = static_cast<int>(host);
      layout.local = static_cast<int>(layout.hosts[host].size());
    }
    layout.hosts[host].push_back(other);
    layout.host_of.push_back(static_cast<int>(host));
  }
  return layout;
}

std::vector<int> HostLayout::leaders() const {
  std::vector<int> ranks;
  for (const auto& host : hosts) ranks.push_back(host.front());
  return ranks;
}

int HostLayout::local_of(int rank) const {
  const auto& ranks = hosts[static_cast<size_t>(host_of[static_cast<size_t>(rank)])];
  return static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin());
}

std::string backend_for(const std::vector<std::string>& host_keys) {
  const HostLayout layout = HostLayout::of(host_keys, 0);
  if (layout.one_host()) return "shm";
  return layout.one_rank_a_host() ? "gloo" : "hierarchical";
}

}  // namespace lockstep::hierarchical
