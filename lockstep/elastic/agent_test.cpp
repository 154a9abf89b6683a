#include "lockstep/elastic/agent.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/simulated_registry.h"

namespace lockstep::elastic {
namespace agent_test {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Agents that share a registry which answers at once. Time passes only by `pass`.
class Job {
 public:
  struct Host {
    AgentOptions options;
    std::unique_ptr<Agent> agent;
    bool online = true;
    int64_t lease = 0;
    std::map<std::string, int64_t> watches;
    std::deque<Event> events;
    std::shared_ptr<const GenerationRecord> running = {};
    size_t index = 0;
    int stores = 0, starts = 0, moves = 0;
    std::optional<Finish> finish = {};
  };

  explicit Job(AgentOptions options) : options_(std::move(options)) {}

  void join(const std::string& id, std::optional<int> node_rank = {}) {
    auto& host = hosts_[id];
    host.options = options_;
    host.options.id = host.options.host = id;
    host.options.node_rank = node_rank;
    host.options.hosts_registry = options_.embedded_registry && hosts_.size() == 1;
    host.agent = std::make_unique<Agent>(host.options);
    perform(host, host.agent->start(now_));
    settle();
  }

  /// A process that is killed, and its workers with it.
  void kill(const std::string& id) { hosts_.erase(id); }
  void cut_off(const std::string& id) { hosts_.at(id).online = false; }
  void reconnect(const std::string& id) { hosts_.at(id).online = true; }
  void end_workers(const std::string& id, const launch::HostEnd& end) {
    auto& host = hosts_.at(id);
    if (!host.running) throw std::logic_error("host " + id + " runs no workers");
    host.events.push_back(WorkersEnded{host.running->number, end});
    host.running.reset();
  }
  void succeed(const std::string& id) { end_workers(id, {.succeeded = true}); }
  void fail(const std::string& id, bool consequence = false) {
    end_workers(id, {.exit_code = 7, .text = id + " failed", .consequence = consequence});
  }
  /// One of a host's workers fails. The others live.
  void lose_worker(const std::string& id) {
    auto& host = hosts_.at(id);
    host.events.push_back(WorkersEnded{
        host.running->number, {.exit_code = 7, .text = id + " lost one", .others_live = true}});
  }
  void leave(const std::string& id) { hosts_.at(id).events.push_back(Leave{}); }
  void tell(const std::string& id, const Event& event) { hosts_.at(id).events.push_back(event); }

  void pass(milliseconds time) {
    for (const Time until = now_ + time; now_ < until; now_ += milliseconds(50)) {
      registry_.expire(now_);
      for (auto& [id, host] : hosts_) {
        if (host.online && host.lease != 0) keep_lease(host);
        const auto deadline = host.agent->deadline();
        if (deadline && *deadline <= now_) host.events.push_back(Tick{});
      }
      settle();
    }
  }

  const Host& host(const std::string& id) const { return hosts_.at(id); }
  /// The number of the generation whose workers a host runs; 0: none.
  int64_t runs(const std::string& id) const {
    const auto& running = hosts_.at(id).running;
    return running ? running->number : 0;
  }
  /// The first rank of its workers; -1: none runs.
  int first_rank(const std::string& id) const {
    const auto& host = hosts_.at(id);
    return host.running ? host.running->members.at(host.index).first_rank : -1;
  }
  std::optional<Finish::Kind> end(const std::string& id) const {
    const auto& finish = hosts_.at(id).finish;
    return finish ? std::optional(finish->kind) : std::nullopt;
  }
  GenerationRecord record() const { return decode_generation(registry_.value(kGenerationKey)); }
  SimulatedRegistry& registry() { return registry_; }

 private:
  void keep_lease(Host& host) {
    if (registry_.keep(host.lease, now_ + options_.keep_alive)) {
      host.events.push_back(LeaseKept{now_});
    } else {
      host.lease = 0;
      host.events.push_back(LeaseLost{});
    }
  }

  void settle() {
    bool quiet = false;
    while (!quiet) {
      quiet = true;
      for (auto& [id, host] : hosts_) {
        retry(host);
        look(host);
        if (host.events.empty() || host.finish) continue;
        quiet = false;
        const auto event = host.events.front();
        host.events.pop_front();
        perform(host, host.agent->take(event, now_));
      }
    }
  }

  void look(Host& host) {
    if (!host.online) return;
    for (auto& [prefix, revision] : host.watches) {
      const auto changed = registry_.changes(prefix, revision);
      revision = changed.revision;
      if (changed.whole || !changed.written.empty() || !changed.erased.empty())
        host.events.push_back(changed);
    }
  }

  /// Requests of a host that was cut off.
  void retry(Host& host) {
    if (!host.online) return;
    const auto requests = std::exchange(waiting_[host.options.id], {});
    for (const auto& request : requests) std::visit([&](const auto& a) { act(host, a); }, request);
  }

  bool holds_back(Host& host, const Action& action) {
    if (!host.online) waiting_[host.options.id].push_back(action);
    return !host.online;
  }

  void perform(Host& host, const std::vector<Action>& actions) {
    for (const auto& action : actions) std::visit([&](const auto& a) { act(host, a); }, action);
  }
  void act(Host& host, const CompareAndSet& action) {
    if (holds_back(host, action)) return;
    if (action.with_lease && host.lease == 0) {
      host.events.push_back(Answered{action.request, Answered::Outcome::lease_gone});
      return;
    }
    host.events.push_back(registry_.compare_and_set(action, action.with_lease ? host.lease : 0));
  }
  void act(Host& host, const GrantLease& action) {
    if (holds_back(host, action)) return;
    host.lease = registry_.grant(now_ + options_.keep_alive);
    host.events.push_back(LeaseGranted{});
  }
  void act(Host& host, const LetGoLease&) {
    if (host.online) registry_.revoke(host.lease);
  }
  void act(Host& host, const Watch& action) { host.watches[action.prefix] = -1; }
  void act(Host& host, const Unwatch& action) { host.watches.erase(action.prefix); }
  void act(Host& host, const OpenStore& action) {
    ++host.stores;
    host.events.push_back(StoreOpened{action.generation, host.options.host, 29'400});
  }
  void act(Host& host, const StartWorkers& action) {
    host.running ? ++host.moves : ++host.starts;
    host.running = action.record;
    host.index = action.index;
  }
  void act(Host& host, const StopWorkers&) {
    if (host.running) end_workers(host.options.id, {});
  }
  void act(Host& host, const Finish& action) {
    host.finish = action;
    host.watches.clear();
    host.lease = 0;
  }
  void act(Host&, const Say&) {}

  AgentOptions options_;
  Time now_{std::chrono::hours(1)};
  SimulatedRegistry registry_;
  std::map<std::string, Host> hosts_;
  std::map<std::string, std::vector<Action>> waiting_;
};

AgentOptions of_hosts(int least, int most, int max_restarts = 0) {
  AgentOptions options;
  options.min_agents = least;
  options.max_agents = most;
  options.nproc = 2;
  options.max_restarts = max_restarts;
  return options;
}

TEST(ElasticAgent, AJobFormsRunsAndSucceeds) {
  Job job(of_hosts(2, 2));
  job.join("a");
  EXPECT_EQ(job.runs("a"), 0);
  job.join("b");
  EXPECT_EQ(job.runs("a"), 1) << "at once, as no more can come";
  EXPECT_EQ(job.runs("b"), 1);
  EXPECT_EQ(job.first_rank("b"), 2);
  EXPECT_EQ(job.host("b").running->world_size(), 4);
  EXPECT_EQ(job.host("b").running->store_address, "a");
  job.succeed("a");
  job.pass(seconds(60));
  EXPECT_FALSE(job.end("a")) << "its store is still needed";
  job.succeed("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::success);
  EXPECT_EQ(job.end("b"), Finish::Kind::success);
}

TEST(ElasticAgent, TheLastCallWaitsForThoseWhoComeTogether) {
  Job job(of_hosts(1, 3));
  job.join("a");
  job.pass(milliseconds(200));
  job.join("b");
  job.pass(milliseconds(200));
  EXPECT_EQ(job.runs("a"), 0);
  job.pass(milliseconds(200));
  EXPECT_EQ(job.record().members.size(), 2u);
  EXPECT_EQ(job.record().number, 1);
}

// ---- Faults of torchrun's that are not to be repeated

TEST(ElasticAgent, ALostHeartbeatBringsANewGenerationWithinTheKeepAlive) {
  Job job(of_hosts(2, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  ASSERT_EQ(job.runs("a"), 1);
  job.kill("c");
  job.pass(milliseconds(2'000 + 300 + 100));
  EXPECT_EQ(job.runs("a"), 2);
  EXPECT_EQ(job.runs("b"), 2);
  EXPECT_EQ(job.record().restarts, 0) << "a lost host is no failure of the job";
}

TEST(ElasticAgent, TheStoreMovesWhenItsHostIsKilled) {
  Job job(of_hosts(2, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  ASSERT_EQ(job.record().store_address, "a");
  job.kill("a");  // It led, too.
  job.pass(seconds(5));
  EXPECT_EQ(job.record().store_address, "b");
  EXPECT_EQ(job.host("b").stores, 1);
  EXPECT_EQ(job.runs("c"), 2);
}

TEST(ElasticAgent, ASurvivorBecomesRankZero) {
  Job job(of_hosts(1, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  job.kill("a");
  job.pass(seconds(5));
  EXPECT_EQ(job.first_rank("b"), 0);
  EXPECT_EQ(job.first_rank("c"), 2);
  EXPECT_EQ(job.record().restarts, 0);
}

TEST(ElasticAgent, AFastRejoinIsTakenAndCountsNothing) {
  Job job(of_hosts(2, 2, 1));
  job.join("a");
  job.join("b");
  job.kill("b");
  job.join("b2");  // While the lease of b lives.
  EXPECT_EQ(job.runs("b2"), 0);
  job.pass(seconds(5));
  EXPECT_GT(job.runs("b2"), 0);
  EXPECT_EQ(job.runs("a"), job.runs("b2"));
  EXPECT_EQ(job.record().restarts, 0);
}

TEST(ElasticAgent, ARejoinDoesNotGoAroundMaxRestarts) {
  Job job(of_hosts(2, 2, 1));
  job.join("a");
  job.join("b");
  job.fail("b");
  job.pass(seconds(1));
  ASSERT_EQ(job.record().restarts, 1);
  job.kill("b");
  job.join("b2");
  job.pass(seconds(5));
  EXPECT_EQ(job.record().restarts, 1);
  job.fail("b2");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::failure);
  EXPECT_EQ(job.host("a").finish->exit_code, 7);
}

TEST(ElasticAgent, AHostThatLeavesDoesNotDisturbTheNextGeneration) {
  Job job(of_hosts(1, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  job.leave("a");  // The leader, with the store.
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::interrupted);
  const auto after = job.record();
  EXPECT_EQ(after.members.size(), 2u);
  EXPECT_EQ(job.runs("b"), after.number);
  job.pass(seconds(60));
  EXPECT_EQ(job.record().number, after.number);
  EXPECT_EQ(after.restarts, 0);
}

TEST(ElasticAgent, AFailureOfSeveralWorkersCountsOnceForTheJob) {
  Job job(of_hosts(3, 3, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  for (const char* id : {"c", "b", "a"}) job.fail(id);
  job.pass(seconds(1));
  EXPECT_EQ(job.record().restarts, 1);
  EXPECT_EQ(job.record().failures.size(), 1u);
  for (const char* id : {"a", "b", "c"}) EXPECT_EQ(job.runs(id), 2);
}

TEST(ElasticAgent, WorkersThatLiveGoOnInTheNextGeneration) {
  Job job(of_hosts(2, 3, 1));
  for (const char* id : {"a", "b"}) job.join(id);
  job.pass(milliseconds(400));
  ASSERT_EQ(job.runs("b"), 1);
  job.lose_worker("b");
  job.pass(seconds(1));
  for (const char* id : {"a", "b"}) {
    EXPECT_EQ(job.runs(id), 2);
    EXPECT_EQ(job.host(id).moves, 1) << "without an end of the others";
  }
  EXPECT_EQ(job.record().restarts, 1);
  job.join("c");
  job.pass(seconds(1));
  EXPECT_EQ(job.runs("a"), 3);
  EXPECT_EQ(job.host("a").moves, 2);
  EXPECT_EQ(job.host("c").starts, 1);
  EXPECT_EQ(job.record().earlier.size(), 1u) << "the first is known to run no more";
  job.kill("c");
  job.pass(seconds(3));
  EXPECT_EQ(job.runs("b"), 4);
  EXPECT_EQ(job.host("b").moves, 3);
  job.lose_worker("a");
  job.lose_worker("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::failure) << "no restart is left";
  EXPECT_EQ(job.host("b").finish->exit_code, 7);
}

TEST(ElasticAgent, AnEndedJobOfTheSameRunIdIsNotOurs) {
  Job job(of_hosts(1, 1, 1));
  job.join("a");
  job.pass(seconds(1));
  job.fail("a");
  job.pass(seconds(1));
  job.fail("a");
  job.pass(seconds(1));
  ASSERT_EQ(job.end("a"), Finish::Kind::failure);
  job.join("b");
  job.pass(seconds(1));
  EXPECT_GT(job.runs("b"), 2) << "numbers go on, for the sake of what else is kept by them";
  EXPECT_EQ(job.record().restarts, 0);
  job.succeed("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("b"), Finish::Kind::success);
}

TEST(ElasticAgent, RanksStayWhenHostsComeAndGo) {
  Job job(of_hosts(2, 4, 1));
  for (const char* id : {"z", "m", "k"}) job.join(id);
  job.pass(seconds(1));
  ASSERT_EQ(job.first_rank("k"), 4);
  job.join("a");
  job.pass(seconds(1));
  EXPECT_EQ(job.first_rank("z"), 0);
  EXPECT_EQ(job.first_rank("m"), 2);
  EXPECT_EQ(job.first_rank("k"), 4);
  EXPECT_EQ(job.first_rank("a"), 6);
  job.kill("m");
  job.pass(seconds(5));
  job.fail("a");
  job.pass(seconds(1));
  EXPECT_EQ(job.first_rank("z"), 0);
  EXPECT_EQ(job.first_rank("k"), 2);
  EXPECT_EQ(job.first_rank("a"), 4);
}

TEST(ElasticAgent, NodeRankZeroHasRankZero) {
  Job job(of_hosts(3, 3));
  job.join("a", 2);
  job.join("b", 1);
  job.join("c", 0);
  EXPECT_EQ(job.first_rank("c"), 0);
  EXPECT_EQ(job.first_rank("b"), 2);
  EXPECT_EQ(job.first_rank("a"), 4);
  EXPECT_EQ(job.record().store_address, "c");
  EXPECT_EQ(job.host("a").stores + job.host("b").stores, 0);
}

TEST(ElasticAgent, ASilentRegistryEndsNothing) {
  Job job(of_hosts(2, 2));
  job.join("a");
  job.join("b");
  for (const char* id : {"a", "b"}) job.cut_off(id);
  job.pass(seconds(40));
  for (const char* id : {"a", "b"}) job.reconnect(id);
  job.pass(seconds(10));
  EXPECT_EQ(job.runs("a"), 1) << "although all leases were lost";
  EXPECT_EQ(job.runs("b"), 1);
  job.succeed("a");
  job.succeed("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("b"), Finish::Kind::success);
}

// ---- Failures

TEST(ElasticAgent, WhatCannotSucceedIsNotTriedAgain) {
  Job job(of_hosts(2, 2, 5));
  job.join("a");
  job.join("b");
  job.end_workers("b", {.exit_code = 127, .text = "no such program", .can_retry = false});
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::failure);
  EXPECT_EQ(job.host("a").finish->exit_code, 127);
}

TEST(ElasticAgent, AConsequenceWaitsForItsCause) {
  Job job(of_hosts(2, 3, 1));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  job.kill("c");
  job.fail("a", true);
  job.fail("b", true);
  job.pass(seconds(3));
  EXPECT_EQ(job.runs("a"), 2);
  EXPECT_EQ(job.record().restarts, 0) << "the lost host is the cause, not those that missed it";
  job.fail("a", true);
  job.pass(seconds(2));
  EXPECT_EQ(job.record().restarts, 0);
  job.fail("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.record().failures, std::vector<std::string>{"b failed"});
  job.fail("a", true);
  job.pass(seconds(4));
  EXPECT_EQ(job.end("b"), Finish::Kind::failure) << "no other cause came";
}

TEST(ElasticAgent, AFailureMakesThoseThatAreDoneStartAgain) {
  Job job(of_hosts(2, 2, 1));
  job.join("a");
  job.join("b");
  job.succeed("a");
  job.pass(seconds(1));
  job.fail("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.runs("a"), 2);
  EXPECT_EQ(job.runs("b"), 2);
}

TEST(ElasticAgent, WhoGoesAfterItWasDoneCountsAsDone) {
  Job job(of_hosts(3, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  job.succeed("b");
  job.succeed("c");
  job.pass(seconds(1));
  job.leave("b");
  job.kill("c");
  job.pass(seconds(10));
  EXPECT_EQ(job.runs("a"), 1);
  job.succeed("a");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::success);
}

/// pytorch#118891: after 300 s torchrun's first host ended, and the store with it.
TEST(ElasticAgent, AFirstHostThatIsDoneWaitsForTheOthersHoweverLong) {
  auto options = of_hosts(2, 2);
  options.embedded_registry = true;
  Job job(options);
  job.join("a");
  job.join("b");
  job.succeed("a");
  job.pass(seconds(1000));
  EXPECT_FALSE(job.end("a"));
  EXPECT_EQ(job.runs("b"), 1);
  job.succeed("b");
  job.pass(seconds(1));
  for (const char* id : {"a", "b"}) EXPECT_EQ(job.end(id), Finish::Kind::success);
}

// ---- Who takes part

TEST(ElasticAgent, TwoHostsWithOneNumberAreRefused) {
  Job job(of_hosts(3, 3));
  job.join("a", 0);
  job.join("b", 1);
  job.join("c", 1);
  job.pass(seconds(5));
  ASSERT_EQ(job.end("a"), Finish::Kind::failure);
  EXPECT_EQ(job.host("a").finish->exit_code, 2);
  EXPECT_NE(job.host("a").finish->text.find("b and c"), std::string::npos);
}

TEST(ElasticAgent, AHostThatIsKilledAndBackAtOnceIsNotOneOfTwo) {
  Job job(of_hosts(3, 3));
  job.join("a", 0);
  job.join("b", 1);
  job.kill("b");
  job.join("again", 1);
  job.pass(seconds(30));
  EXPECT_FALSE(job.end("a"));
  job.join("c", 2);
  job.pass(seconds(1));
  EXPECT_EQ(job.first_rank("again"), 2);
}

TEST(ElasticAgent, MoreThanTheMostStandBy) {
  Job job(of_hosts(1, 2));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  job.pass(seconds(60));
  EXPECT_EQ(job.runs("c"), 0);
  EXPECT_FALSE(job.end("c"));
  EXPECT_EQ(job.record().number, 1);
  job.kill("a");
  job.pass(seconds(5));
  EXPECT_EQ(job.first_rank("b"), 0);
  EXPECT_EQ(job.first_rank("c"), 2);
}

TEST(ElasticAgent, TooFewStopAndWait) {
  Job job(of_hosts(2, 2));
  job.join("a");
  job.join("b");
  job.kill("b");
  job.pass(seconds(10));
  EXPECT_EQ(job.runs("a"), 0);
  job.pass(seconds(500));
  EXPECT_FALSE(job.end("a"));
  job.join("c");
  job.pass(seconds(1));
  EXPECT_GT(job.runs("a"), 1);
  EXPECT_EQ(job.runs("a"), job.runs("c"));
}

TEST(ElasticAgent, ALostHostEndsAJobThatWaitsForNone) {
  AgentOptions options = of_hosts(2, 2);
  options.ends_with_a_host = true;
  Job job(options);
  job.join("a");
  job.join("b");
  job.kill("b");
  job.pass(seconds(10));
  EXPECT_EQ(job.end("a"), Finish::Kind::failure);
}

TEST(ElasticAgent, TooFewForTooLongEndTheJob) {
  Job job(of_hosts(2, 2));
  job.join("a");
  job.pass(seconds(599));
  EXPECT_FALSE(job.end("a"));
  job.pass(seconds(2));
  EXPECT_EQ(job.end("a"), Finish::Kind::failure);
}

TEST(ElasticAgent, AnInterruptEndsAJobOfAFixedSizeEverywhere) {
  Job job(of_hosts(3, 3, 3));
  for (const char* id : {"a", "b", "c"}) job.join(id);
  job.leave("b");
  job.pass(seconds(1));
  for (const char* id : {"a", "b", "c"}) EXPECT_EQ(job.end(id), Finish::Kind::interrupted);
  EXPECT_TRUE(job.record().earlier.empty()) << "the next job need not wait";
}

// ---- Without contact

TEST(ElasticAgent, WithoutContactTheWorkersStop) {
  Job job(of_hosts(1, 1));
  job.join("a");
  job.pass(seconds(1));
  job.cut_off("a");
  job.pass(seconds(59));
  EXPECT_EQ(job.runs("a"), 1);
  job.pass(seconds(2));
  EXPECT_EQ(job.runs("a"), 0);
  job.reconnect("a");
  job.pass(seconds(5));
  EXPECT_EQ(job.runs("a"), 2);
}

TEST(ElasticAgent, ADisjointSuccessorWaitsUntilTheEarlierOneMustHaveStopped) {
  Job job(of_hosts(1, 1));
  job.join("a");
  job.join("b");
  ASSERT_EQ(job.runs("a"), 1);
  job.cut_off("a");
  job.pass(seconds(2 + 60 + 25));
  EXPECT_EQ(job.runs("a"), 0);
  EXPECT_EQ(job.runs("b"), 0);
  job.pass(seconds(10));
  EXPECT_EQ(job.runs("b"), 2);
  job.reconnect("a");
  job.pass(seconds(10));
  EXPECT_EQ(job.runs("a"), 0);
  EXPECT_EQ(job.runs("b"), 2);
}

TEST(ElasticAgent, ADisjointSuccessorDoesNotWaitForAHostThatHasSaidThatItStopped) {
  Job job(of_hosts(1, 2));
  job.join("a", 0);
  job.join("b", 0);  // Stands by for its place.
  job.pass(seconds(1));
  ASSERT_EQ(job.runs("b"), 0);
  job.leave("a");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::interrupted);
  EXPECT_EQ(job.runs("b"), 2);
}

TEST(ElasticAgent, WhoLosesAnEmbeddedRegistryKeepsItsWorkers) {
  auto options = of_hosts(2, 2);
  options.embedded_registry = true;
  Job job(options);
  job.join("a");
  job.join("b");
  job.cut_off("b");
  job.pass(seconds(300));
  EXPECT_EQ(job.runs("b"), 1);
  job.succeed("b");
  job.pass(seconds(1));
  EXPECT_EQ(job.end("b"), Finish::Kind::success);
}

TEST(ElasticAgent, AGenerationForAnEarlierLifeIsNotStarted) {
  Job job(of_hosts(2, 2));
  job.join("a");
  job.pass(seconds(1));
  job.cut_off("a");
  job.pass(seconds(3));  // Its lease is over, and it does not know.
  GenerationRecord record{.job = "x", .number = 1, .members = {{"a", 2, 0, 0}}};
  record.store_address = "a";
  record.store_port = 1;
  job.registry().compare_and_set({.key = kGenerationKey, .value = encode(record)}, 0);
  job.reconnect("a");
  job.pass(milliseconds(150));
  EXPECT_EQ(job.host("a").starts, 0);
  const auto own = decode_agent(job.registry().value("agents/a"));
  EXPECT_EQ(own.life, 1);
  EXPECT_EQ(own.report.generation, 1);
  EXPECT_EQ(own.report.state, Report::State::stopped);
}

/// By the leader's clock the time is over, but its view may be old: the members may be back.
TEST(ElasticLeader, ADisjointSuccessorNeedsANewView) {
  AgentOptions options = of_hosts(1, 1);
  options.id = "l";
  Leader leader(options);
  const Time start{std::chrono::hours(1)};
  AgentRecord own;
  leader.take({.prefix = kAgentsPrefix,
               .written = {{"agents/l", encode(own), 5}},
               .revision = 5,
               .whole = true},
              start);
  auto record = std::make_shared<GenerationRecord>();
  record->job = "j";
  record->number = 1;
  record->members = {{"a", 1, 0, 0}};
  record->store_address = "a";
  record->store_port = 1;
  EXPECT_FALSE(leader.propose(record, false, {}, start + seconds(1)));
  EXPECT_FALSE(leader.propose(record, false, {}, start + seconds(90)));
  EXPECT_EQ(leader.probe(), 0);
  EXPECT_FALSE(leader.propose(record, false, {}, start + seconds(91)));
  EXPECT_EQ(leader.probe(), 1) << "it wants to know";
  own.probe = 1;
  leader.take({.prefix = kAgentsPrefix, .written = {{"agents/l", encode(own), 9}}, .revision = 9},
              start + seconds(92));
  const auto next = leader.propose(record, false, {}, start + seconds(92));
  ASSERT_TRUE(next);
  EXPECT_EQ(next->members.at(0).agent, "l");
  EXPECT_TRUE(next->earlier.empty());
}

TEST(ElasticAgent, ARegistryThatWasStartedAnewIsNotOurs) {
  Job job(of_hosts(1, 1));
  job.join("a");
  job.pass(seconds(1));
  job.tell("a", Changed{.prefix = kGenerationKey, .revision = 1, .whole = true});
  job.pass(seconds(1));
  EXPECT_EQ(job.end("a"), Finish::Kind::lost);
}

}  // namespace agent_test
}  // namespace lockstep::elastic
