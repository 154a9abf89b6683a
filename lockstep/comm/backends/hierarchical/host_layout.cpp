#include "lockstep/comm/backends/hierarchical/host_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

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
  }
  return layout;
}

std::vector<int> HostLayout::leaders() const {
  std::vector<int> ranks;
  for (const auto& host : hosts) ranks.push_back(host.front());
  return ranks;
}

size_t HostLayout::size() const {
  return std::accumulate(hosts.begin(), hosts.end(), size_t{0},
                         [](size_t sum, const auto& host) { return sum + host.size(); });
}

int HostLayout::host_of(int rank) const {
  for (size_t host = 0; host < hosts.size(); ++host) {
    if (std::binary_search(hosts[host].begin(), hosts[host].end(), rank))
      return static_cast<int>(host);
  }
  throw std::out_of_range("a rank that is not of the group");
}

int HostLayout::local_of(int rank) const {
  const auto& host = hosts[static_cast<size_t>(host_of(rank))];
  return static_cast<int>(std::lower_bound(host.begin(), host.end(), rank) - host.begin());
}

std::string backend_for(const std::vector<std::string>& host_keys) {
  const HostLayout layout = HostLayout::of(host_keys, 0);
  if (layout.one_host()) return "shm";
  return layout.one_rank_a_host() ? "gloo" : "hierarchical";
}

}  // namespace lockstep::hierarchical
