#include "tests/support/simulation_rules.h"

#include <optional>

namespace lockstep::elastic {

void SimulationRules::broken(const std::string& what) const {
  throw BrokenRule("seed " + std::to_string(plan_.seed) + ", after " +
                   std::to_string(result_.steps) + " steps: " + what);
}

void SimulationRules::take_record(GenerationRecord record) {
  const auto before = std::exchange(record_, std::move(record));
  check_members();
  if (record_.has_store()) records_[record_.number] = record_.members;
  if (record_.ended()) ends_.insert(record_.end.kind);
  result_.generations = record_.number;
  result_.end = record_.end.kind;
  check_step(before);
}

void SimulationRules::check_members() const {
  const auto& limits = plan_.options;
  const size_t count = record_.members.size();
  require(count == 0 || (count >= static_cast<size_t>(limits.min_agents) &&
                         count <= static_cast<size_t>(limits.max_agents)),
          "too few or too many members");
  std::set<std::string> ids;
  for (const auto& member : record_.members) {
    require(ids.insert(member.agent).second, "a member twice");
    require(options_of_(member.agent).nproc == member.nproc, "another nproc");
  }
  require(record_.restarts <= limits.max_restarts, "more restarts than allowed");
  require(static_cast<size_t>(record_.restarts) == record_.failures.size(), "a failure forgotten");
}

void SimulationRules::check_step(const GenerationRecord& before) {
  if (before.ended() || before.number == 0) {
    if (record_.number == before.number && before.number != 0) {
      require(record_.end == before.end && record_.earlier.size() < before.earlier.size(),
              "an end that changes");
      return;
    }
    require(record_.number == before.number + 1 && record_.job != before.job, "no new job");
    require(record_.restarts == 0, "an earlier job's restarts");
    return;
  }
  require(record_.job == before.job, "another job before the end");
  if (record_.number == before.number) {
    require(record_.members == before.members && record_.restarts == before.restarts,
            "a generation that changes");
    require(record_.ended() || (!before.has_store() && record_.has_store()), "no change");
    return;
  }
  require(record_.number == before.number + 1, "a number left out");
  const int counted = record_.restarts - before.restarts;
  require(counted == 0 || counted == 1, "a failure counted twice");
  if (counted == 1) {
    require(failed_.count(before.number), "a restart without a failure");
    result_.restarts = record_.restarts;
  }
  check_order(before);
}

void SimulationRules::check_order(const GenerationRecord& before) const {
  if (plan_.node_ranks) {
    int last = -1;
    for (const auto& member : record_.members) {
      const int place = *options_of_(member.agent).node_rank;
      require(place > last, "a node_rank that does not decide");
      last = place;
    }
    return;
  }
  std::optional<size_t> last;
  bool new_ones = false;
  for (const auto& member : record_.members) {
    const auto place = before.index_of(member.agent);
    if (!place) {
      new_ones = true;
      continue;
    }
    require(!new_ones, "a new member before one that remains");
    require(!last || *place > *last, "ranks that move");
    last = place;
  }
}

void SimulationRules::store_opened(int64_t generation, const std::string& host) {
  stores_.insert({generation, host});
}

void SimulationRules::workers_start(const StartWorkers& action, const std::string& host,
                                    int64_t last) const {
  const auto& record = *action.record;
  require(record.number > last, "an agent goes back to an earlier generation");
  require(record.members.at(action.index).agent == host, "workers of another host");
  require(stores_.count({record.number, record.store_address}), "workers without a store");
  require(record.store_address == record.members[0].agent, "the store elsewhere");
  const auto known = records_.find(record.number);
  require(known != records_.end() && known->second == record.members, "an unknown record");
}

void SimulationRules::becomes_active(int64_t generation) {
  active_.insert(generation);
  require(active_.size() == 1, "two generations are active");
}

void SimulationRules::finishes(const Finish& action, bool left) const {
  using Kind = Finish::Kind;
  const bool embedded = plan_.options.embedded_registry;
  if (action.kind == Kind::success && !embedded)
    require(ends_.count(JobEnd::Kind::success), "a success that the record does not have");
  if (action.kind == Kind::failure && !embedded)
    require(ends_.count(JobEnd::Kind::failure), "a failure that the record does not have");
  if (action.kind == Kind::interrupted)
    require(left || ends_.count(JobEnd::Kind::interrupted), "nobody has interrupted it");
}

void SimulationRules::check_end(bool success_expected, bool stores_fail) const {
  if (!success_expected) return;
  const bool failed = record_.end.kind == JobEnd::Kind::failure &&
                      (record_.end.exit_code == kWorkerExitCode || stores_fail);
  require(record_.end.kind == JobEnd::Kind::success || failed,
          "enough hosts were there, but the job did not succeed");
}

}  // namespace lockstep::elastic
