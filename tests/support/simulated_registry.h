#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/elastic/agent_events.h"

namespace lockstep::elastic {

/// What lies in a registry and the rules by which it changes, as etcd's. For tests.
class SimulatedRegistry {
 public:
  int64_t grant(Time until);
  /// False: there is no such lease any more.
  bool keep(int64_t lease, Time until);
  void revoke(int64_t lease);
  void expire(Time now);
  /// As after a new start of etcd: each lease gets a whole time to live again.
  void prolong(Time until);
  /// With lease 0 the key is not bound.
  Answered compare_and_set(const CompareAndSet& request, int64_t lease);
  /// Under a prefix since a revision; -1: all that is there.
  Changed changes(const std::string& prefix, int64_t since) const;
  int64_t revision() const { return revision_; }
  /// Of the last change under a prefix; 0: none.
  int64_t last_change(const std::string& prefix) const;
  /// Empty: not there.
  std::string value(const std::string& key) const;

 private:
  struct Held {
    std::string value;
    int64_t revision = 0;
    int64_t lease = 0;
  };
  struct Log {
    std::map<std::string, Held> records;
    std::vector<std::pair<int64_t, std::string>> changes;  ///< Revision and key.
  };
  struct Lease {
    Time until;
    std::set<std::string> keys;
  };
  Log& log_of(const std::string& key);

  int64_t revision_ = 1;
  int64_t next_lease_ = 1;
  std::map<std::string, Log> logs_;  ///< By prefix: what is watched apart.
  std::map<int64_t, Lease> leases_;
};

}  // namespace lockstep::elastic
