#include "tests/support/simulation.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/elastic/agent.h"
#include "tests/support/simulated_registry.h"

namespace lockstep::elastic {
namespace {

using Duration = std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kWorkerExitCode = 7;
constexpr milliseconds kRetry{1'000};
constexpr int kAttempts = 4;
/// For how long workers wait for those of other hosts.
constexpr milliseconds kRendezvous{10'000};
/// Between the faults' end and the time at which contact is back everywhere.
constexpr milliseconds kRecovery{5'000};

/// A host with its agent and workers.
struct Host {
  std::string id;
  AgentOptions options;
  std::unique_ptr<Agent> agent;
  bool alive = true;
  std::optional<Finish> finish;
  bool left = false;  ///< The user has interrupted it.
  // The process.
  bool suspended = false;
  Duration lag{0};  ///< By which its clock is behind, for it stood still.
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

struct Generation {
  std::shared_ptr<const GenerationRecord> record;
  size_t running = 0;
  bool begun = false;
  bool broken = false;  ///< A member's workers have ended otherwise than by success.
};

std::string event_text(const Event& event) {
  constexpr const char* kNames[] = {"changed",    "answered",      "lease granted", "lease lost",
                                    "lease kept", "workers ended", "store opened",  "store failed",
                                    "leave",      "tick"};
  std::string text = std::string("- ") + kNames[event.index()];
  if (const auto* answer = std::get_if<Answered>(&event))
    return text + " " + std::to_string(static_cast<int>(answer->outcome)) + " at " +
           std::to_string(answer->revision);
  if (const auto* changed = std::get_if<Changed>(&event))
    return text + " " + changed->prefix + (changed->whole ? " whole" : "") + " at " +
           std::to_string(changed->revision);
  return text;
}

class Simulation {
 public:
  explicit Simulation(const SimulationPlan& plan) : plan_(plan), random_(plan.seed) {}

  SimulationResult run();

 private:
  using Call = std::function<void()>;
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
  void check_active();
  void check_record();
  void check_step(const GenerationRecord& before);
  void check_order(const GenerationRecord& before);
  void check_end();
  bool over() const;
  [[noreturn]] void broken(const std::string& what) const;
  void require(bool holds, const char* what) const {
    if (!holds) broken(what);
  }
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
  std::set<int64_t> active_;
  std::set<std::pair<int64_t, std::string>> stores_;
  GenerationRecord record_;  ///< As it lies in the registry.
  int64_t record_revision_ = 0;
  std::map<int64_t, std::vector<Member>> records_;  ///< That had a store.
  std::set<JobEnd::Kind> ends_;
  std::set<int64_t> failed_;
  bool mended_ = false;
  bool success_expected_ = false;
  SimulationResult result_;
};

// ---- Hosts

void Simulation::add_host() {
  const size_t i = hosts_.size();
  auto& host = hosts_.emplace_back();
  host.id = std::string("h").append(std::to_string(i));
  index_[host.id] = i;
  host.options = plan_.options;
  host.options.id = host.options.host = host.options.address = host.id;
  host.options.nproc = 1 + static_cast<int>(random_.below(4));
  host.options.hosts_registry = plan_.options.embedded_registry && i == 0;
  if (plan_.node_ranks) {
    std::set<int> taken;
    for (const auto& other : hosts_) {
      if (other.alive && !other.finish && other.options.node_rank)
        taken.insert(*other.options.node_rank);
    }
    int place = 0;
    while (taken.count(place)) ++place;
    host.options.node_rank = place;
  }
  host.agent = std::make_unique<Agent>(host.options);
  trace(i, "starts");
  perform(i, host.agent->start(now_ - host.lag));
  schedule_tick(i);
}

void Simulation::deliver(size_t i, const Event& event) {
  auto& host = hosts_[i];
  if (!host.alive || host.finish) return;
  if (host.suspended) {
    host.waiting.push_back(event);
    return;
  }
  ++result_.steps;
  if (plan_.traces) trace(i, event_text(event));
  perform(i, host.agent->take(event, now_ - host.lag));
  const auto deadline = host.agent->deadline();
  require(!deadline || *deadline > now_ - host.lag, "a deadline that has passed");
  schedule_tick(i);
}

void Simulation::perform(size_t i, const std::vector<Action>& actions) {
  for (const auto& action : actions) {
    require(!hosts_[i].finish, "an action after the last one");
    std::visit([&](const auto& a) { act(i, a); }, action);
  }
}

void Simulation::schedule_tick(size_t i) {
  auto& host = hosts_[i];
  if (!host.alive || host.finish || host.suspended) return;
  const auto deadline = host.agent->deadline();
  if (!deadline) {
    host.tick.reset();
    return;
  }
  const Time time = std::max<Time>(*deadline + host.lag, now_ + Duration(1));
  if (host.tick == time) return;
  host.tick = time;
  at(time, [this, i, time] {
    if (hosts_[i].tick != time || hosts_[i].suspended) return;
    hosts_[i].tick.reset();
    deliver(i, Tick{});
  });
}

void Simulation::suspend(size_t i, bool clock_stands, Duration time) {
  if (hosts_[i].suspended) return;
  trace(i, "is suspended");
  hosts_[i].suspended = true;
  after(time, [this, i, clock_stands, time] { resume(i, clock_stands, time); });
}

void Simulation::resume(size_t i, bool clock_stood, Duration time) {
  auto& host = hosts_[i];
  if (!host.alive || !host.suspended) return;
  trace(i, "goes on");
  host.suspended = false;
  if (clock_stood) host.lag += time;
  auto waiting = std::exchange(host.waiting, {});
  if (chance(0.5)) deliver(i, Tick{});
  for (const auto& event : waiting) deliver(i, event);
  host.tick.reset();
  schedule_tick(i);
  for (const auto& [prefix, revision] : host.watches) notify(i, prefix);
  keep_lease(i, ++host.lease_epoch);
}

void Simulation::crash(size_t i) {
  auto& host = hosts_[i];
  if (!host.alive) return;
  trace(i, "crashes");
  host.alive = false;
  if (host.running != 0) {
    const int64_t number = std::exchange(host.running, 0);
    --generations_[number].running;
    break_generation(number);
  }
  if (host.options.hosts_registry) {
    registry_up_ = false;
    registry_gone_ = true;
  }
}

// ---- The network

Duration Simulation::latency(size_t i) {
  if (chance(slow_) && !hosts_[i].options.hosts_registry)
    return between(milliseconds(1), milliseconds(4'000));
  return Duration(100 + random_.below(1'000));
}

/// An embedded registry is reached through its host, and from there always.
bool Simulation::connected(size_t i, bool Host::*way) const {
  if (!registry_up_) return false;
  if (hosts_[i].options.hosts_registry) return true;
  const auto& server = hosts_[0];
  const bool served =
      !plan_.options.embedded_registry || (server.sends && server.receives && !server.suspended);
  return served && hosts_[i].*way;
}

bool Simulation::loses(size_t i) {
  return chance(loss_) && !hosts_[i].options.hosts_registry;
}

void Simulation::to_registry(size_t i, const Call& call, size_t bytes) {
  ++result_.messages;
  result_.bytes += bytes;
  const int copies = loses(i) ? 0 : chance(repeats_) ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    after(latency(i) + service(), [this, i, call] {
      if (!connected(i, &Host::sends)) return;
      call();
      check_record();
      notify_all();
    });
  }
}

void Simulation::to_host(size_t i, const Call& call, size_t bytes) {
  ++result_.messages;
  result_.bytes += bytes;
  if (loses(i)) return;
  after(latency(i), [this, i, call] {
    if (connected(i, &Host::receives)) call();
  });
}

/// Tries again until an answer comes, and then does with it what `carry_out` returned, once. Each
/// try may be carried out, also late.
void Simulation::request(size_t i, std::function<Call()> carry_out, Call failed, size_t bytes) {
  auto answered = std::make_shared<bool>(false);
  const auto attempt = [=, this] {
    const auto answer = [=, this](const Call& take) {
      to_host(
          i,
          [=] {
            if (!std::exchange(*answered, true)) take();
          },
          0);
    };
    to_registry(
        i, [=] { answer(carry_out()); }, bytes);
  };
  attempt();
  for (int k = 1; k <= kAttempts; ++k) {
    after(k * kRetry, [=, this] {
      if (*answered || !hosts_[i].alive) return;
      if (k < kAttempts) return attempt();
      *answered = true;
      failed();
    });
  }
}

void Simulation::keep_lease(size_t i, int epoch) {
  auto& host = hosts_[i];
  if (!host.alive || host.finish || host.suspended || epoch != host.lease_epoch) return;
  const int64_t lease = host.lease;
  if (lease != 0) {
    const Time sent = now_ - host.lag;
    to_registry(
        i,
        [this, i, epoch, lease, sent] {
          const bool kept = registry_.keep(lease, now_ + plan_.options.keep_alive);
          to_host(
              i,
              [this, i, lease, kept, sent] {
                if (hosts_[i].lease != lease) return;
                if (!kept) hosts_[i].lease = 0;
                deliver(i, kept ? Event(LeaseKept{sent}) : Event(LeaseLost{}));
              },
              0);
        },
        0);
  }
  after(plan_.options.keep_alive / 3, [this, i, epoch] { keep_lease(i, epoch); });
}

void Simulation::watch(size_t i, const std::string& prefix) {
  hosts_[i].watches[prefix] = -1;
  ++hosts_[i].watch_epoch[prefix];
  ++result_.messages;
  notify(i, prefix);
}

/// One batch of changes is on its way at a time, so that they come in order. What is lost on the
/// way comes again with the next.
void Simulation::notify(size_t i, const std::string& prefix) {
  auto& host = hosts_[i];
  if (!host.alive || host.finish || !host.delivering.insert(prefix).second) return;
  const int epoch = host.watch_epoch[prefix];
  after(latency(i), [this, i, prefix, epoch] {
    const auto watched = hosts_[i].watches.find(prefix);
    if (watched == hosts_[i].watches.end() || !registry_up_) return retry_notify(i, prefix);
    const auto changed = changes(prefix, chance(forgets_) ? -1 : watched->second);
    after(latency(i) + service(), [this, i, prefix, epoch, changed] {
      auto& to = hosts_[i];
      const bool arrives = connected(i, &Host::sends) && connected(i, &Host::receives) && !loses(i);
      if (!arrives || epoch != to.watch_epoch[prefix]) return retry_notify(i, prefix);
      to.delivering.erase(prefix);
      to.watches[prefix] = changed->revision;
      if (registry_.last_change(prefix) > changed->revision) notify(i, prefix);
      if (!changed->whole && changed->written.empty() && changed->erased.empty()) return;
      ++result_.messages;
      for (const auto& entry : changed->written) result_.bytes += entry.value.size();
      deliver(i, *changed);
    });
  });
}

/// What many watch is put together once.
std::shared_ptr<const Changed> Simulation::changes(const std::string& prefix, int64_t since) {
  auto& [key, changed] = changes_[prefix];
  const auto wanted = std::make_pair(since, registry_.revision());
  if (!changed || key != wanted) {
    key = wanted;
    changed = std::make_shared<const Changed>(registry_.changes(prefix, since));
  }
  return changed;
}

/// How long a message waits for the registry and is worked at. One at a time is.
Duration Simulation::service() {
  free_at_ = std::max(free_at_, now_) + plan_.service;
  return std::chrono::duration_cast<Duration>(free_at_ - now_);
}

void Simulation::retry_notify(size_t i, const std::string& prefix) {
  if (!hosts_[i].watches.count(prefix) || registry_gone_) {
    hosts_[i].delivering.erase(prefix);
    return;
  }
  after(kRetry, [this, i, prefix] {
    hosts_[i].delivering.erase(prefix);
    if (hosts_[i].watches.count(prefix)) notify(i, prefix);
  });
}

void Simulation::notify_all() {
  for (const char* prefix : {kAgentsPrefix, kLeaderKey, kGenerationKey}) {
    if (registry_.last_change(prefix) <= notified_) continue;
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (hosts_[i].watches.count(prefix)) notify(i, prefix);
    }
  }
  notified_ = registry_.revision();
}

void Simulation::expire_leases() {
  if (registry_gone_) return;
  if (registry_up_) {
    registry_.expire(now_);
    notify_all();
  }
  after(milliseconds(100), [this] { expire_leases(); });
}

// ---- Actions

void Simulation::act(size_t i, const CompareAndSet& action) {
  trace(i, "writes " + action.key + " at " + std::to_string(action.expected) + ": " + action.value);
  const int64_t lease = action.with_lease ? hosts_[i].lease : 0;
  if (action.with_lease && lease == 0) {  // It was lost; the event is on its way.
    after(Duration(1), [=, this] {
      deliver(i, Answered{action.request, Answered::Outcome::lease_gone});
    });
    return;
  }
  request(
      i,
      [=, this]() -> Call {
        const auto answer = registry_.compare_and_set(action, lease);
        return [=, this] { deliver(i, answer); };
      },
      [=, this] {
        deliver(i, Answered{action.request, Answered::Outcome::failed});
      },
      action.value.size());
}

void Simulation::act(size_t i, const Unwatch& action) {
  hosts_[i].watches.erase(action.prefix);
  ++hosts_[i].watch_epoch[action.prefix];
  ++result_.messages;
}

void Simulation::act(size_t i, const GrantLease&) {
  const int epoch = ++hosts_[i].lease_epoch;
  hosts_[i].lease = 0;
  request(
      i,
      [=, this]() -> Call {
        const int64_t lease = registry_.grant(now_ + plan_.options.keep_alive);
        return [=, this] {
          hosts_[i].lease = lease;
          deliver(i, LeaseGranted{});
        };
      },
      [=, this] { deliver(i, LeaseLost{}); }, 0);
  after(plan_.options.keep_alive / 3, [this, i, epoch] { keep_lease(i, epoch); });
}

void Simulation::act(size_t i, const LetGoLease&) {
  const int64_t lease = std::exchange(hosts_[i].lease, 0);
  to_registry(
      i, [this, lease] { registry_.revoke(lease); }, 0);
}

void Simulation::act(size_t i, const OpenStore& action) {
  const int64_t number = action.generation;
  after(between(milliseconds(1), milliseconds(100)), [=, this] {
    if (!hosts_[i].alive) return;
    if (!mended_ && chance(store_failures_)) {
      failed_.insert(number);
      return deliver(i, StoreOpened{.generation = number, .error = "no free port"});
    }
    stores_.insert({number, hosts_[i].id});
    deliver(i, StoreOpened{number, hosts_[i].id, static_cast<uint16_t>(1 + number % 60'000)});
  });
}

void Simulation::act(size_t i, const StartWorkers& action) {
  auto& host = hosts_[i];
  const int64_t number = action.record->number;
  trace(i, "starts workers of " + std::to_string(number));
  require(host.running == 0, "an agent runs two generations");
  require(number > host.last_started, "an agent goes back to an earlier generation");
  require(action.record->members.at(action.index).agent == host.id, "workers of another host");
  require(stores_.count({number, action.record->store_address}), "workers without a store");
  require(action.record->store_address == action.record->members[0].agent, "the store elsewhere");
  const auto known = records_.find(number);
  require(known != records_.end() && known->second == action.record->members, "an unknown record");
  host.running = host.last_started = number;
  host.stopping = false;
  ++host.worker_epoch;
  auto& generation = generations_[number];
  generation.record = action.record;
  if (++generation.running == action.record->members.size() && !generation.broken) begin(number);
  if (generation.broken) break_generation(number);
  after(kRendezvous, [=, this] {
    const bool waits = hosts_[i].running == number && !generations_[number].begun;
    if (hosts_[i].alive && waits && !hosts_[i].stopping) workers_end(i, false, true);
  });
}

void Simulation::begin(int64_t number) {
  generations_[number].begun = true;
  active_.insert(number);
  check_active();
  trace(0, "generation " + std::to_string(number) + " is active");
  for (const auto& member : generations_[number].record->members) {
    const size_t i = index_.at(member.agent);
    after(Duration(plan_.work) + between(milliseconds(0), milliseconds(200)), [=, this] {
      if (hosts_[i].running != number || hosts_[i].stopping || generations_[number].broken) return;
      workers_end(i, true, false);
    });
  }
}

void Simulation::act(size_t i, const StopWorkers& action) {
  auto& host = hosts_[i];
  trace(i, "stops its workers");
  if (host.running == 0) return;  // They have ended; the event is on its way.
  host.stopping = true;
  const int epoch = ++host.worker_epoch;
  after(between(milliseconds(0), milliseconds(action.interrupted ? 3'000 : 1'000)), [=, this] {
    if (hosts_[i].alive && hosts_[i].worker_epoch == epoch) workers_end(i, chance(0.2), false);
  });
}

void Simulation::act(size_t i, const Finish& action) {
  auto& host = hosts_[i];
  trace(i, "finishes " + std::to_string(static_cast<int>(action.kind)) + " " + action.text);
  require(host.running == 0, "an agent goes while its workers run");
  host.finish = action;
  host.watches.clear();
  if (host.options.hosts_registry) {
    after(milliseconds(500), [this] {
      registry_up_ = false;
      registry_gone_ = true;
    });
  }
  using Kind = Finish::Kind;
  const bool embedded = plan_.options.embedded_registry;
  if (action.kind == Kind::success && !embedded)
    require(ends_.count(JobEnd::Kind::success), "a success that the record does not have");
  if (action.kind == Kind::failure && !embedded)
    require(ends_.count(JobEnd::Kind::failure), "a failure that the record does not have");
  if (action.kind == Kind::interrupted)
    require(host.left || ends_.count(JobEnd::Kind::interrupted), "nobody has interrupted it");
}

// ---- Workers

void Simulation::workers_end(size_t i, bool succeeded, bool consequence) {
  auto& host = hosts_[i];
  const int64_t number = std::exchange(host.running, 0);
  trace(i, std::string("workers end, ") + (succeeded ? "well" : "badly"));
  ++host.worker_epoch;
  --generations_[number].running;
  active_.erase(number);
  if (!succeeded || host.stopping) break_generation(number);
  if (!succeeded && !host.stopping) failed_.insert(number);
  WorkersEnded ended{number, succeeded};
  if (!succeeded) {
    ended.exit_code = kWorkerExitCode;
    ended.text = host.id + " failed in " + std::to_string(number);
    ended.can_retry = mended_ || !chance(0.05);
    ended.consequence = consequence;
  }
  deliver(i, ended);
}

/// The others lose a peer, and notice it sooner or later.
void Simulation::break_generation(int64_t number) {
  auto& generation = generations_[number];
  generation.broken = true;
  active_.erase(number);
  for (const auto& member : generation.record->members) {
    const size_t i = index_.at(member.agent);
    if (hosts_[i].running != number) continue;
    after(between(milliseconds(1), milliseconds(4'000)), [=, this] {
      if (!hosts_[i].alive || hosts_[i].running != number || hosts_[i].stopping) return;
      workers_end(i, false, chance(0.8));
    });
  }
}

// ---- Faults

std::optional<size_t> Simulation::pick(const std::function<bool(const Host&)>& fits) {
  std::vector<size_t> found;
  for (size_t i = 0; i < hosts_.size(); ++i) {
    if (hosts_[i].alive && !hosts_[i].finish && fits(hosts_[i])) found.push_back(i);
  }
  if (found.empty()) return std::nullopt;
  return found[random_.below(found.size())];
}

void Simulation::fault() {
  if (mended_) return;
  const auto host = pick([](const Host&) { return true; });
  switch (random_.below(12)) {
    case 0:
      if (host && !(hosts_[*host].options.hosts_registry && chance(0.7))) crash(*host);
      break;
    case 1:
    case 2:
      add_host();
      break;
    case 3:
      if (host) cut(*host, true, true);
      break;
    case 4:
      if (host) cut(*host, chance(0.5), chance(0.5));
      break;
    case 5:
      if (host) suspend_for_a_while(*host);
      break;
    case 6:
      stop_registry();
      break;
    case 7:
      loss_ = chance(0.5) ? 0.3 : 0;
      repeats_ = 0.3;
      slow_ = chance(0.5) ? 0.2 : 0;
      forgets_ = chance(0.3) ? 0.3 : 0;
      store_failures_ = chance(0.2) ? 0.2 : 0;
      break;
    case 8:
      if (host && chance(0.5)) leave(*host);
      break;
    case 9:
      for (size_t i = 0; i < hosts_.size(); ++i) {
        if (chance(0.6)) cut(i, true, true);
      }
      break;
    default:
      if (const auto victim = pick([](const Host& h) { return h.running != 0 && !h.stopping; }))
        workers_end(*victim, false, false);
  }
}

void Simulation::leave(size_t i) {
  trace(i, "is interrupted");
  hosts_[i].left = true;
  deliver(i, Leave{});
}

void Simulation::suspend_for_a_while(size_t i) {
  const bool clock_stands = chance(0.5);
  const Duration time = between(milliseconds(100), milliseconds(2'000));
  if (hosts_[i].lag + time > milliseconds(4'000)) return;
  suspend(i, clock_stands, time);
}

void Simulation::cut(size_t i, bool sends, bool receives) {
  trace(i, "is cut off");
  if (sends) hosts_[i].sends = false;
  if (receives) hosts_[i].receives = false;
  after(between(milliseconds(100), milliseconds(15'000)),
        [this, i] { hosts_[i].sends = hosts_[i].receives = true; });
}

/// All hosts of the generation at once, as behind a switch, while their workers run on.
void Simulation::split() {
  const auto& limits = plan_.options;
  const auto most = limits.contact_limit + limits.contact_margin + 2 * limits.keep_alive;
  const Duration together = between(milliseconds(1'000), most);
  trace(0, "the generation is cut off");
  for (const auto& member : record_.members) {
    const size_t i = index_.at(member.agent);
    hosts_[i].sends = hosts_[i].receives = false;
    after(together + between(milliseconds(0), milliseconds(500)),
          [this, i] { hosts_[i].sends = hosts_[i].receives = true; });
  }
  if (!chance(0.5)) return;
  after(together, [this] { slow_ = 0.3; });
}

void Simulation::stop_registry() {
  if (!registry_up_ || plan_.options.embedded_registry) return;
  trace(0, "the registry is down");
  registry_up_ = false;
  after(between(milliseconds(100), milliseconds(12'000)), [this] { start_registry(); });
}

void Simulation::start_registry() {
  if (registry_gone_ || registry_up_) return;
  trace(0, "the registry is up");
  registry_up_ = true;
  if (chance(0.5)) registry_.prolong(now_ + plan_.options.keep_alive);
}

void Simulation::mend() {
  trace(0, "all is mended");
  mended_ = true;
  loss_ = repeats_ = slow_ = forgets_ = 0;
  for (auto& host : hosts_) host.sends = host.receives = true;
  start_registry();
  after(kRecovery, [this] { expect_success(); });
}

/// Whether enough hosts are there to bring the job to its end.
void Simulation::expect_success() {
  const auto limits = plan_.options;
  int there = 0;
  for (const auto& host : hosts_) {
    const bool stays = host.alive && !host.finish && !host.left;
    const bool has_place = !host.options.node_rank || *host.options.node_rank < limits.max_agents;
    if (stays && has_place) ++there;
  }
  const bool undecided = !record_.ended() && !registry_gone_;
  const bool blocked = limits.embedded_registry && !record_.earlier.empty();
  success_expected_ = undecided && !blocked && there >= limits.min_agents;
}

// ---- Rules

void Simulation::check_active() {
  require(active_.size() <= 1, "two generations are active");
}

void Simulation::check_record() {
  if (registry_.last_change(kGenerationKey) == record_revision_) return;
  record_revision_ = registry_.last_change(kGenerationKey);
  const auto before = std::exchange(record_, decode_generation(registry_.value(kGenerationKey)));
  const auto& limits = plan_.options;
  const size_t count = record_.members.size();
  require(count == 0 || (count >= static_cast<size_t>(limits.min_agents) &&
                         count <= static_cast<size_t>(limits.max_agents)),
          "too few or too many members");
  std::set<std::string> ids;
  for (const auto& member : record_.members) {
    require(ids.insert(member.agent).second, "a member twice");
    require(hosts_[index_.at(member.agent)].options.nproc == member.nproc, "another nproc");
  }
  require(record_.restarts <= limits.max_restarts, "more restarts than allowed");
  require(static_cast<size_t>(record_.restarts) == record_.failures.size(), "a failure forgotten");
  if (record_.has_store()) records_[record_.number] = record_.members;
  if (record_.ended()) ends_.insert(record_.end.kind);
  result_.generations = record_.number;
  check_step(before);
}

void Simulation::check_step(const GenerationRecord& before) {
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

void Simulation::check_order(const GenerationRecord& before) {
  if (plan_.node_ranks) {
    int last = -1;
    for (const auto& member : record_.members) {
      const int place = *hosts_[index_.at(member.agent)].options.node_rank;
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

bool Simulation::over() const {
  if (plan_.until_running && !active_.empty()) {
    const auto& members = generations_.at(*active_.begin()).record->members;
    if (members.size() == static_cast<size_t>(plan_.agents)) return true;
  }
  return mended_ && std::none_of(hosts_.begin(), hosts_.end(),
                                 [](const Host& host) { return host.alive && !host.finish; });
}

void Simulation::check_end() {
  result_.end = record_.end.kind;
  result_.time = std::chrono::duration_cast<milliseconds>(now_ - started_);
  if (!success_expected_) return;
  const bool failed = record_.end.kind == JobEnd::Kind::failure &&
                      (record_.end.exit_code == kWorkerExitCode || store_failures_ > 0);
  require(record_.end.kind == JobEnd::Kind::success || failed,
          "enough hosts were there, but the job did not succeed");
}

void Simulation::broken(const std::string& what) const {
  throw BrokenRule("seed " + std::to_string(plan_.seed) + ", after " +
                   std::to_string(result_.steps) + " steps: " + what);
}

void Simulation::trace(size_t i, const std::string& text) const {
  if (!plan_.traces) return;
  std::printf("%9.4f h%zu %s\n", std::chrono::duration<double>(now_ - started_).count(), i,
              text.c_str());
}

SimulationResult Simulation::run() {
  for (int i = 0; i < plan_.agents; ++i) after(between({}, plan_.arrival), [this] { add_host(); });
  for (int i = 0; i < plan_.faults; ++i) after(between({}, plan_.fault_time), [this] { fault(); });
  if (plan_.splits) after(between(milliseconds(500), milliseconds(3'000)), [this] { split(); });
  after(std::max(plan_.fault_time, plan_.arrival) + milliseconds(1), [this] { mend(); });
  expire_leases();
  const auto& options = plan_.options;
  const Time limit = now_ + plan_.arrival + plan_.fault_time + 2 * plan_.work +
                     3 * (options.join_timeout + options.contact_limit + options.contact_margin);
  while (!queue_.empty() && !over()) {
    auto next = queue_.top();
    queue_.pop();
    now_ = next.at;
    next.call();
    require(now_ < limit, "the job does not come to an end");
  }
  require(over(), "nothing happens any more");
  check_end();
  return result_;
}

}  // namespace

SimulationPlan random_plan(uint64_t seed) {
  KeyedRandom random(seed, 1);
  const auto below = [&](int bound) { return static_cast<int>(random.below(bound)); };
  SimulationPlan plan;
  plan.seed = seed;
  auto& options = plan.options;
  options.min_agents = 1 + below(3);
  options.max_agents = options.min_agents + (below(3) == 0 ? 0 : below(3));
  options.max_restarts = below(5);
  options.embedded_registry = below(3) == 0;
  options.join_timeout = std::chrono::seconds(40);
  options.contact_limit = std::chrono::seconds(6);
  options.contact_margin = std::chrono::seconds(8);
  plan.agents = options.min_agents + below(3);
  plan.node_ranks = below(5) == 0;
  plan.faults = below(4) == 0 ? 30 : below(12);
  plan.arrival = milliseconds(below(2) == 0 ? 100 : 4'000);
  plan.fault_time = milliseconds(1'000 + below(20'000));
  plan.work = milliseconds(100 + below(8'000));
  if (below(8) != 0) return plan;
  plan.splits = true;
  options.embedded_registry = false;
  plan.agents = options.max_agents + options.min_agents + below(2);
  plan.arrival = milliseconds(100);
  plan.work = plan.fault_time = milliseconds(40'000);
  plan.faults = below(4);
  return plan;
}

SimulationResult simulate(const SimulationPlan& plan) {
  return Simulation(plan).run();
}

}  // namespace lockstep::elastic
