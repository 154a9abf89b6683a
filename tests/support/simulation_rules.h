#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/elastic/agent_events.h"
#include "tests/support/simulation.h"

namespace lockstep::elastic {

/// What must hold at every step of a simulated job. Told of all that happens in it. Each call may
/// throw BrokenRule.
class SimulationRules {
 public:
  /// The exit code of workers that fail.
  static constexpr int kWorkerExitCode = 7;

  /// `options_of`: of the agent with that id. `result` is filled in as the job goes on; it and
  /// `plan` must outlive this.
  SimulationRules(const SimulationPlan& plan, SimulationResult& result,
                  std::function<const AgentOptions&(const std::string&)> options_of)
      : plan_(plan), result_(result), options_of_(std::move(options_of)) {}

  [[noreturn]] void broken(const std::string& what) const;
  void require(bool holds, const char* what) const {
    if (!holds) broken(what);
  }

  /// The job's record has changed in the registry.
  void take_record(GenerationRecord record);
  const GenerationRecord& record() const { return record_; }
  void store_opened(int64_t generation, const std::string& host);
  /// `last`: the generation that the host started last.
  void workers_start(const StartWorkers& action, const std::string& host, int64_t last) const;
  /// All members' workers of the generation run now.
  void becomes_active(int64_t generation);
  void no_longer_active(int64_t generation) { active_.erase(generation); }
  /// The active one; none: 0.
  int64_t active() const { return active_.empty() ? 0 : *active_.begin(); }
  void has_failed(int64_t generation) { failed_.insert(generation); }
  /// `left`: the user has interrupted the agent.
  void finishes(const Finish& action, bool left) const;
  /// The simulation is over. `success_expected`: enough hosts were there. `stores_fail`: a failure
  /// may also be a store's.
  void check_end(bool success_expected, bool stores_fail) const;

 private:
  void check_members() const;
  void check_step(const GenerationRecord& before);
  void check_order(const GenerationRecord& before) const;

  const SimulationPlan& plan_;
  SimulationResult& result_;
  std::function<const AgentOptions&(const std::string&)> options_of_;
  GenerationRecord record_;
  std::map<int64_t, std::vector<Member>> records_;  ///< That had a store.
  std::set<std::pair<int64_t, std::string>> stores_;
  std::set<int64_t> active_, failed_;
  std::set<JobEnd::Kind> ends_;
};

}  // namespace lockstep::elastic
