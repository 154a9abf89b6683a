#include "tests/support/simulated_registry.h"

#include <algorithm>

namespace lockstep::elastic {

namespace {

/// "agents/" of "agents/ID", else the key itself.
std::string prefix_of(const std::string& key) {
  const size_t slash = key.find('/');
  return slash == std::string::npos ? key : key.substr(0, slash + 1);
}

}  // namespace

SimulatedRegistry::Log& SimulatedRegistry::log_of(const std::string& key) {
  return logs_[prefix_of(key)];
}

int64_t SimulatedRegistry::grant(Time until) {
  leases_[next_lease_].until = until;
  return next_lease_++;
}

bool SimulatedRegistry::keep(int64_t lease, Time until) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return false;
  found->second.until = std::max(found->second.until, until);
  return true;
}

void SimulatedRegistry::prolong(Time until) {
  for (auto& [id, lease] : leases_) lease.until = until;
}

void SimulatedRegistry::revoke(int64_t lease) {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return;
  ++revision_;
  for (const auto& key : found->second.keys) {
    auto& log = log_of(key);
    log.records.erase(key);
    log.changes.emplace_back(revision_, key);
  }
  leases_.erase(found);
}

void SimulatedRegistry::expire(Time now) {
  std::vector<int64_t> over;
  for (const auto& [id, lease] : leases_) {
    if (lease.until <= now) over.push_back(id);
  }
  for (const int64_t id : over) revoke(id);
}

Answered SimulatedRegistry::compare_and_set(const CompareAndSet& request, int64_t lease) {
  using Outcome = Answered::Outcome;
  Answered answer{request.request, Outcome::lease_gone};
  const auto holder = leases_.find(lease);
  if (lease != 0 && holder == leases_.end()) return answer;
  auto& log = log_of(request.key);
  const auto found = log.records.find(request.key);
  const bool there = found != log.records.end();
  const bool repeated =
      there && found->second.value == request.value && found->second.lease == lease;
  answer.outcome = Outcome::done;
  if ((there ? found->second.revision : 0) == request.expected) {
    if (there && found->second.lease != 0) leases_[found->second.lease].keys.erase(request.key);
    log.records[request.key] = {request.value, ++revision_, lease};
    log.changes.emplace_back(revision_, request.key);
    if (lease != 0) holder->second.keys.insert(request.key);
  } else if (!repeated) {
    answer.outcome = Outcome::conflict;
  }
  answer.revision = revision_;
  const auto now = log.records.find(request.key);
  if (now != log.records.end()) {
    answer.entry = Record{request.key, now->second.value, now->second.revision};
  }
  return answer;
}

Changed SimulatedRegistry::changes(const std::string& prefix, int64_t since) const {
  Changed changed{.prefix = prefix, .revision = revision_, .whole = since < 0};
  const auto found = logs_.find(prefix);
  if (found == logs_.end()) return changed;
  const auto& [records, log] = found->second;
  if (changed.whole) {
    for (const auto& [key, record] : records)
      changed.written.push_back({key, record.value, record.revision});
    return changed;
  }
  auto first = std::upper_bound(log.begin(), log.end(), since,
                                [](int64_t at, const auto& change) { return at < change.first; });
  std::set<std::string> keys;
  for (; first != log.end(); ++first) keys.insert(first->second);
  for (const auto& key : keys) {
    const auto record = records.find(key);
    if (record == records.end()) {
      changed.erased.push_back(key);
    } else {
      changed.written.push_back({key, record->second.value, record->second.revision});
    }
  }
  return changed;
}

int64_t SimulatedRegistry::last_change(const std::string& prefix) const {
  const auto found = logs_.find(prefix);
  return found == logs_.end() || found->second.changes.empty() ? 0
                                                               : found->second.changes.back().first;
}

std::string SimulatedRegistry::value(const std::string& key) const {
  const auto log = logs_.find(prefix_of(key));
  if (log == logs_.end()) return {};
  const auto found = log->second.records.find(key);
  return found == log->second.records.end() ? std::string() : found->second.value;
}

}  // namespace lockstep::elastic
