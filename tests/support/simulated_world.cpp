#include "tests/support/simulated_world.h"

#include <algorithm>
#include <cstdio>

namespace lockstep::elastic {
namespace {

constexpr std::chrono::milliseconds kRetry{1'000};
constexpr int kAttempts = 4;
/// For how long workers wait for those of other hosts.
constexpr std::chrono::milliseconds kRendezvous{10'000};

std::string event_text(const Event& event) {
  constexpr const char* kNames[] = {"changed",      "answered",   "lease granted",
                                    "lease lost",   "lease kept", "workers ended",
                                    "store opened", "leave",      "tick"};
  std::string text = std::string("- ") + kNames[event.index()];
  if (const auto* answer = std::get_if<Answered>(&event))
    return text + " " + std::to_string(static_cast<int>(answer->outcome)) + " at " +
           std::to_string(answer->revision);
  if (const auto* changed = std::get_if<Changed>(&event))
    return text + " " + changed->prefix + (changed->whole ? " whole" : "") + " at " +
           std::to_string(changed->revision);
  return text;
}

}  // namespace

// ---- Hosts

void SimulatedWorld::add_host() {
  const size_t i = hosts_.size();
  auto& host = hosts_.emplace_back();
  host.id = std::string("h").append(std::to_string(i));
  index_[host.id] = i;
  host.options = plan_.options;
  host.options.id = host.options.host = host.id;
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

void SimulatedWorld::deliver(size_t i, const Event& event) {
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

void SimulatedWorld::perform(size_t i, const std::vector<Action>& actions) {
  for (const auto& action : actions) {
    require(!hosts_[i].finish, "an action after the last one");
    std::visit([&](const auto& a) { act(i, a); }, action);
  }
}

void SimulatedWorld::schedule_tick(size_t i) {
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

void SimulatedWorld::suspend(size_t i, bool clock_stands, Duration time) {
  if (hosts_[i].suspended) return;
  trace(i, "is suspended");
  hosts_[i].suspended = true;
  after(time, [this, i, clock_stands, time] { resume(i, clock_stands, time); });
}

void SimulatedWorld::resume(size_t i, bool clock_stood, Duration time) {
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

void SimulatedWorld::crash(size_t i) {
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

SimulatedWorld::Duration SimulatedWorld::latency(size_t i) {
  if (chance(slow_) && !hosts_[i].options.hosts_registry)
    return between(milliseconds(1), milliseconds(4'000));
  return Duration(100 + random_.below(1'000));
}

/// An embedded registry is reached through its host, and from there always.
bool SimulatedWorld::connected(size_t i, bool Host::*way) const {
  if (!registry_up_) return false;
  if (hosts_[i].options.hosts_registry) return true;
  const auto& server = hosts_[0];
  const bool served =
      !plan_.options.embedded_registry || (server.sends && server.receives && !server.suspended);
  return served && hosts_[i].*way;
}

bool SimulatedWorld::loses(size_t i) {
  return chance(loss_) && !hosts_[i].options.hosts_registry;
}

void SimulatedWorld::to_registry(size_t i, const Call& call, size_t bytes) {
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

void SimulatedWorld::to_host(size_t i, const Call& call, size_t bytes) {
  ++result_.messages;
  result_.bytes += bytes;
  if (loses(i)) return;
  after(latency(i), [this, i, call] {
    if (connected(i, &Host::receives)) call();
  });
}

/// Tries again until an answer comes, and then does with it what `carry_out` returned, once. Each
/// try may be carried out, also late.
void SimulatedWorld::request(size_t i, std::function<Call()> carry_out, Call failed, size_t bytes) {
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

void SimulatedWorld::keep_lease(size_t i, int epoch) {
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

void SimulatedWorld::watch(size_t i, const std::string& prefix) {
  hosts_[i].watches[prefix] = -1;
  ++hosts_[i].watch_epoch[prefix];
  ++result_.messages;
  notify(i, prefix);
}

/// One batch of changes is on its way at a time, so that they come in order. What is lost on the
/// way comes again with the next.
void SimulatedWorld::notify(size_t i, const std::string& prefix) {
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
std::shared_ptr<const Changed> SimulatedWorld::changes(const std::string& prefix, int64_t since) {
  auto& [key, changed] = changes_[prefix];
  const auto wanted = std::make_pair(since, registry_.revision());
  if (!changed || key != wanted) {
    key = wanted;
    changed = std::make_shared<const Changed>(registry_.changes(prefix, since));
  }
  return changed;
}

/// How long a message waits for the registry and is worked at. One at a time is.
SimulatedWorld::Duration SimulatedWorld::service() {
  free_at_ = std::max(free_at_, now_) + plan_.service;
  return std::chrono::duration_cast<Duration>(free_at_ - now_);
}

void SimulatedWorld::retry_notify(size_t i, const std::string& prefix) {
  if (!hosts_[i].watches.count(prefix) || registry_gone_) {
    hosts_[i].delivering.erase(prefix);
    return;
  }
  after(kRetry, [this, i, prefix] {
    hosts_[i].delivering.erase(prefix);
    if (hosts_[i].watches.count(prefix)) notify(i, prefix);
  });
}

void SimulatedWorld::notify_all() {
  for (const char* prefix : {kAgentsPrefix, kLeaderKey, kGenerationKey}) {
    if (registry_.last_change(prefix) <= notified_) continue;
    for (size_t i = 0; i < hosts_.size(); ++i) {
      if (hosts_[i].watches.count(prefix)) notify(i, prefix);
    }
  }
  notified_ = registry_.revision();
}

void SimulatedWorld::expire_leases() {
  if (registry_gone_) return;
  if (registry_up_) {
    registry_.expire(now_);
    notify_all();
  }
  after(milliseconds(100), [this] { expire_leases(); });
}

// ---- Actions

void SimulatedWorld::act(size_t i, const CompareAndSet& action) {
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

void SimulatedWorld::act(size_t i, const Unwatch& action) {
  hosts_[i].watches.erase(action.prefix);
  ++hosts_[i].watch_epoch[action.prefix];
  ++result_.messages;
}

void SimulatedWorld::act(size_t i, const GrantLease&) {
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

void SimulatedWorld::act(size_t i, const LetGoLease&) {
  const int64_t lease = std::exchange(hosts_[i].lease, 0);
  to_registry(
      i, [this, lease] { registry_.revoke(lease); }, 0);
}

void SimulatedWorld::act(size_t i, const OpenStore& action) {
  const int64_t number = action.generation;
  after(between(milliseconds(1), milliseconds(100)), [=, this] {
    if (!hosts_[i].alive) return;
    if (!mended_ && chance(store_failures_)) {
      rules_.has_failed(number);
      return deliver(i, StoreOpened{.generation = number, .error = "no free port"});
    }
    rules_.store_opened(number, hosts_[i].id);
    deliver(i, StoreOpened{number, hosts_[i].id, static_cast<uint16_t>(1 + number % 60'000)});
  });
}

void SimulatedWorld::act(size_t i, const StartWorkers& action) {
  auto& host = hosts_[i];
  const int64_t number = action.record->number;
  trace(i, "starts workers of " + std::to_string(number));
  require(!host.stopping || host.running == 0, "workers that stop start again");
  rules_.workers_start(action, host.id, host.last_started);
  if (host.running != 0) leave_generation(i);
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

void SimulatedWorld::begin(int64_t number) {
  generations_[number].begun = true;
  rules_.becomes_active(number);
  trace(0, "generation " + std::to_string(number) + " is active");
  for (const auto& member : generations_[number].record->members) {
    const size_t i = index_.at(member.agent);
    after(Duration(plan_.work) + between(milliseconds(0), milliseconds(200)), [=, this] {
      if (hosts_[i].running != number || hosts_[i].stopping || generations_[number].broken) return;
      workers_end(i, true, false);
    });
  }
}

void SimulatedWorld::act(size_t i, const StopWorkers& action) {
  auto& host = hosts_[i];
  trace(i, "stops its workers");
  if (host.running == 0) return;  // They have ended; the event is on its way.
  host.stopping = true;
  const int epoch = ++host.worker_epoch;
  after(between(milliseconds(0), milliseconds(action.interrupted ? 3'000 : 1'000)), [=, this] {
    if (hosts_[i].alive && hosts_[i].worker_epoch == epoch) workers_end(i, chance(0.2), false);
  });
}

void SimulatedWorld::act(size_t i, const Finish& action) {
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
  rules_.finishes(action, host.left);
}

// ---- Workers

void SimulatedWorld::workers_end(size_t i, bool succeeded, bool consequence) {
  auto& host = hosts_[i];
  const int64_t number = std::exchange(host.running, 0);
  trace(i, std::string("workers end, ") + (succeeded ? "well" : "badly"));
  ++host.worker_epoch;
  --generations_[number].running;
  rules_.no_longer_active(number);
  if (!succeeded || host.stopping) break_generation(number);
  if (!succeeded && !host.stopping) rules_.has_failed(number);
  launch::HostEnd end{.succeeded = succeeded};
  if (!succeeded) {
    end.exit_code = SimulationRules::kWorkerExitCode;
    end.text = host.id + " failed in " + std::to_string(number);
    end.can_retry = mended_ || !chance(0.05);
    end.consequence = consequence;
  }
  deliver(i, WorkersEnded{number, end});
}

/// Its workers go on in a later one, or end before that begins.
void SimulatedWorld::leave_generation(size_t i) {
  const int64_t number = std::exchange(hosts_[i].running, 0);
  --generations_[number].running;
  break_generation(number);
}

/// One has failed. The others wait for the next generation.
void SimulatedWorld::worker_fails(size_t i) {
  const int64_t number = hosts_[i].running;
  trace(i, "a worker fails");
  rules_.has_failed(number);
  break_generation(number);
  deliver(i, WorkersEnded{number,
                          {.exit_code = SimulationRules::kWorkerExitCode,
                           .text = hosts_[i].id + " lost a worker in " + std::to_string(number),
                           .others_live = true}});
}

/// The others lose a peer, and notice it sooner or later.
void SimulatedWorld::break_generation(int64_t number) {
  auto& generation = generations_[number];
  generation.broken = true;
  rules_.no_longer_active(number);
  for (const auto& member : generation.record->members) {
    const size_t i = index_.at(member.agent);
    if (hosts_[i].running != number) continue;
    // Or they wait for the next generation, but not for ever.
    const Duration patience = chance(0.5) ? Duration(kRendezvous) : Duration(0);
    after(patience + between(milliseconds(1), milliseconds(4'000)), [=, this] {
      if (!hosts_[i].alive || hosts_[i].running != number || hosts_[i].stopping) return;
      workers_end(i, false, chance(0.8));
    });
  }
}

// ---- From the first host to the last

void SimulatedWorld::check_record() {
  if (registry_.last_change(kGenerationKey) == record_revision_) return;
  record_revision_ = registry_.last_change(kGenerationKey);
  rules_.take_record(decode_generation(registry_.value(kGenerationKey)));
}

bool SimulatedWorld::over() const {
  if (plan_.until_running && rules_.active() != 0) {
    const auto& members = generations_.at(rules_.active()).record->members;
    if (members.size() == static_cast<size_t>(plan_.agents)) return true;
  }
  return mended_ && std::none_of(hosts_.begin(), hosts_.end(),
                                 [](const Host& host) { return host.alive && !host.finish; });
}

void SimulatedWorld::trace(size_t i, const std::string& text) const {
  if (!plan_.traces) return;
  std::printf("%9.4f h%zu %s\n", std::chrono::duration<double>(now_ - started_).count(), i,
              text.c_str());
}

SimulationResult SimulatedWorld::run() {
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
  result_.time = std::chrono::duration_cast<milliseconds>(now_ - started_);
  rules_.check_end(success_expected_, store_failures_ > 0);
  return result_;
}

}  // namespace lockstep::elastic
