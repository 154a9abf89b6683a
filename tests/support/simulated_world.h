#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/elastic/agent.h"
#include "tests/support/simulated_registry.h"
#include "tests/support/simulation.h"
#include "tests/support/simulation_rules.h"

namespace lockstep::elastic {

/// A host with its agent and workers.
struct SimulatedHost {
  std::string id;
  AgentOptions options;
  std::unique_ptr<Agent> agent;
  bool alive = true;
  std::optional<Finish> finish;
  bool left = false;  ///< The user has interrupted it.
  // The process.
  bool suspended = false;
  std::chrono::microseconds lag{0};  ///< By which its clock is behind, for it stood still.
  std::deque<Event> waiting;
  std::optional<Time> tick;
  // The network.
  bool sends = true, receives = true;
  int64_t lease = 0;
  int lease_epoch = 0;
  std::map<std::string, int64_t> watches;  ///< Revision that was delivered; -1: none yet.
  std::set<std::string> delivering;
  std::map<std::string, int> watch_epoch;
  // The workers.
  int64_t running = 0, last_started = 0;
  bool stopping = false;
  int worker_epoch = 0;
};

struct SimulatedGeneration {
  std::shared_ptr<const GenerationRecord> record;
  size_t running = 0;
  bool begun = false;
  bool broken = false;  ///< A member's workers have ended otherwise than by success.
};

/// Agents with their hosts, workers, network and registry, and what goes wrong there. All follows
/// from the plan.
class SimulatedWorld {
 public:
  explicit SimulatedWorld(const SimulationPlan& plan) : plan_(plan), random_(plan.seed) {}

  SimulationResult run();

 private:
  using Duration = std::chrono::microseconds;
  using milliseconds = std::chrono::milliseconds;
  using Call = std::function<void()>;
  using Host = SimulatedHost;
  using Generation = SimulatedGeneration;
  struct Scheduled {
    Time at;
    uint64_t order;
    Call call;
    bool operator<(const Scheduled& other) const {
      return std::tie(other.at, other.order) < std::tie(at, order);
    }
  };

  // Time.
  void at(Time time, Call call) { queue_.push({time, order_++, std::move(call)}); }
  void after(Duration time, Call call) { at(now_ + time, std::move(call)); }
  Duration between(milliseconds low, milliseconds high) {
    const Duration range = high - low;
    return Duration(low) + Duration(random_.below(static_cast<uint64_t>(range.count()) + 1));
  }
  bool chance(double probability) { return random_.uniform() < probability; }

  // Hosts.
  void add_host();
  void deliver(size_t i, const Event& event);
  void perform(size_t i, const std::vector<Action>& actions);
  void schedule_tick(size_t i);
  void suspend(size_t i, bool clock_stands, Duration time);
  void resume(size_t i, bool clock_stood, Duration time);
  void crash(size_t i);

  // The network.
  Duration latency(size_t i);
  bool connected(size_t i, bool Host::*way) const;
  bool loses(size_t i);
  void to_registry(size_t i, const Call& call, size_t bytes);
  void to_host(size_t i, const Call& call, size_t bytes);
  void request(size_t i, std::function<Call()> carry_out, Call failed, size_t bytes);
  void keep_lease(size_t i, int epoch);
  void watch(size_t i, const std::string& prefix);
  void notify(size_t i, const std::string& prefix);
  std::shared_ptr<const Changed> changes(const std::string& prefix, int64_t since);
  Duration service();
  void retry_notify(size_t i, const std::string& prefix);
  void notify_all();
  void expire_leases();

  // Actions.
  void act(size_t i, const CompareAndSet& action);
  void act(size_t i, const Watch& action) { watch(i, action.prefix); }
  void act(size_t i, const Unwatch& action);
  void act(size_t i, const GrantLease&);
  void act(size_t i, const LetGoLease&);
  void act(size_t i, const OpenStore& action);
  void act(size_t i, const StartWorkers& action);
  void act(size_t i, const StopWorkers& action);
  void act(size_t i, const Finish& action);
  void act(size_t i, const Say& action) { trace(i, "says: " + action.text); }

  // Workers.
  void begin(int64_t number);
  void workers_end(size_t i, bool succeeded, bool consequence);
  void leave_generation(size_t i);
  void worker_fails(size_t i);
  void break_generation(int64_t number);

  // Faults.
  void fault();
  void leave(size_t i);
  void suspend_for_a_while(size_t i);
  void cut(size_t i, bool sends, bool receives);
  void split();
  void stop_registry();
  void start_registry();
  std::optional<size_t> pick(const std::function<bool(const Host&)>& fits);
  void mend();
  void expect_success();

  // Rules.
  void check_record();
  bool over() const;
  void require(bool holds, const char* what) const { rules_.require(holds, what); }
  void trace(size_t i, const std::string& text) const;

  SimulationPlan plan_;
  KeyedRandom random_;
  Time now_{std::chrono::hours(1)};
  const Time started_ = now_;
  std::priority_queue<Scheduled> queue_;
  uint64_t order_ = 0;
  std::deque<Host> hosts_;
  std::map<std::string, size_t> index_;
  SimulatedRegistry registry_;
  std::map<std::string, std::pair<std::pair<int64_t, int64_t>, std::shared_ptr<const Changed>>>
      changes_;
  Time free_at_{};
  bool registry_up_ = true, registry_gone_ = false;
  // Probabilities.
  double loss_ = 0, repeats_ = 0, slow_ = 0, forgets_ = 0, store_failures_ = 0;
  int64_t notified_ = 0;
  std::map<int64_t, Generation> generations_;
  int64_t record_revision_ = 0;
  bool mended_ = false;
  bool success_expected_ = false;
  SimulationResult result_;
  SimulationRules rules_{plan_, result_, [this](const std::string& id) -> const AgentOptions& {
                           return hosts_[index_.at(id)].options;
                         }};
};

}  // namespace lockstep::elastic
