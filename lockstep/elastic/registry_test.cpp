#include "lockstep/elastic/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "lockstep/elastic/embedded_registry.h"
#include "lockstep/elastic/etcd_registry.h"
#include "tests/support/calling_registry.h"
#include "tests/support/etcd_servers.h"

// What is the same for all servers: etcd, and the embedded one with and without a token.
namespace lockstep::elastic {
namespace registry_test {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Kind = Request::Kind;
using Outcome = Reply::Outcome;
using ::testing::ElementsAre;

constexpr auto kLimit = 30s;

class Registries : public testing::TestWithParam<const char*> {
 protected:
  static bool is_etcd() { return std::string(GetParam()) == "etcd"; }

  static void TearDownTestSuite() {
    cluster().reset();
    embedded() = {};
  }

  void SetUp() override {
    if (is_etcd() && !test_etcd::is_there()) GTEST_SKIP() << "etcd is not installed";
    if (is_etcd() && !cluster()) cluster() = std::make_unique<test_etcd::Cluster>();
    const std::string token = std::string(GetParam()) == "token" ? "0123456789abcdef" : "";
    if (!is_etcd()) {
      embedded() = serve_registry({.host = "127.0.0.1", .token = token});
    }
    options_ = {.endpoints = is_etcd() ? cluster()->endpoints()
                                       : std::vector<std::string>{"http://127.0.0.1:" +
                                                                  std::to_string(embedded().port)},
                .token = token,
                .request_timeout = kLimit};
    registry_ = client();
    // Each test has its own keys.
    prefix_ = std::string(testing::UnitTest::GetInstance()->current_test_info()->name()) + "/";
  }

  std::unique_ptr<CallingRegistry> client() { return call_registry(options_); }
  std::string key(const std::string& name) const { return prefix_ + name; }

  Reply put(const std::string& name, const std::string& value, int64_t lease = 0,
            std::optional<int64_t> expected = std::nullopt) {
    return registry_->call({.kind = Kind::put,
                            .key = key(name),
                            .value = value,
                            .expected = expected,
                            .lease = lease});
  }
  std::vector<Record> list(const std::string& name = "") {
    return registry_->call({.kind = Kind::list, .key = key(name)}).records;
  }
  int64_t grant(std::chrono::seconds ttl) {
    return registry_->call({.kind = Kind::grant_lease, .ttl = ttl}).lease;
  }
  Outcome keep(int64_t lease) {
    return registry_->call({.kind = Kind::keep_lease, .lease = lease}).outcome;
  }
  Change next_change(Registry& registry) {
    const auto event = registry.next_event(kLimit);
    if (!event || !std::holds_alternative<Change>(*event))
      throw std::runtime_error("no change came");
    return std::get<Change>(*event);
  }

  EtcdRegistryOptions options_;
  std::unique_ptr<CallingRegistry> registry_;
  std::string prefix_;

 private:
  static std::unique_ptr<test_etcd::Cluster>& cluster() {
    static std::unique_ptr<test_etcd::Cluster> one;
    return one;
  }
  static EmbeddedRegistry& embedded() {
    static EmbeddedRegistry one;
    return one;
  }
};

std::vector<std::string> names_of(const std::vector<Record>& records, size_t skip) {
  std::vector<std::string> names;
  for (const Record& record : records)
    names.push_back(record.key.substr(skip) + "=" + record.value);
  return names;
}

TEST_P(Registries, WhatIsPutIsThere) {
  const Reply first = put("b", "1"), second = put("a", "2"), other = put("aa/x", "3");
  EXPECT_GT(second.revision, first.revision);  // A put that was tried again counts twice.
  EXPECT_EQ(names_of(list(), prefix_.size()), (std::vector<std::string>{"a=2", "aa/x=3", "b=1"}));
  EXPECT_EQ(names_of(list("aa"), prefix_.size()), std::vector<std::string>{"aa/x=3"});
  EXPECT_EQ(second.records, (std::vector<Record>{{key("a"), "2", second.revision, 0}}));
  EXPECT_EQ(list("a").at(0), second.records.at(0));
  EXPECT_TRUE(registry_->call({.kind = Kind::list, .key = key("none")}).records.empty());
}

TEST_P(Registries, AnyBytesMayBeKeysAndValues) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  put(bytes, bytes + std::string(100'000, 'x'));
  put("\xff\xff", "");
  const auto records = list(bytes);
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].value, bytes + std::string(100'000, 'x'));
  EXPECT_EQ(list("\xff").size(), 1U);
}

TEST_P(Registries, CompareAndSetWritesOnlyOverWhatIsExpected) {
  const Reply made = put("x", "1", 0, 0);
  EXPECT_EQ(made.outcome, Outcome::done);
  const Reply late = put("x", "2", 0, 0);
  EXPECT_EQ(late.outcome, Outcome::conflict);
  EXPECT_EQ(late.records, made.records);
  const Reply changed = put("x", "3", 0, made.records.at(0).revision);
  EXPECT_EQ(changed.outcome, Outcome::done);
  EXPECT_EQ(put("x", "4", 0, made.records.at(0).revision).outcome, Outcome::conflict);
  const Reply same = put("x", "3", 0, made.records.at(0).revision);
  EXPECT_EQ(same.outcome, Outcome::done) << "it may be that we wrote it and lost the answer";
  EXPECT_EQ(same.records, changed.records);
  const Reply none = put("y", "1", 0, 77);
  EXPECT_EQ(none.outcome, Outcome::conflict);
  EXPECT_TRUE(none.records.empty());
}

TEST_P(Registries, ClientsThatCountUpByCompareAndSetLoseNoCount) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const auto mine = client();
      for (int done = 0; done < 10;) {
        const Reply now = mine->call({.kind = Kind::list, .key = key("count")});
        const std::string old = now.records.empty() ? "0 " : now.records[0].value;
        const int64_t revision = now.records.empty() ? 0 : now.records[0].revision;
        const Reply reply = mine->call(
            {.kind = Kind::put,
             .key = key("count"),
             .value = std::to_string(std::stoi(old) + 1) + " by " + std::to_string(thread),
             .expected = revision});
        if (reply.outcome == Outcome::done) ++done;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::stoi(list("count").at(0).value), 40);
}

TEST_P(Registries, AWatchBeginsWithAllThatIsThereAndTellsEachChange) {
  put("a", "1");
  const uint64_t watch = registry_->watch(prefix_), other = registry_->watch("other/");
  std::map<uint64_t, Change> first;
  for (int i = 0; i < 2; ++i) {
    const Change change = next_change(*registry_);
    first[change.watch] = change;
  }
  EXPECT_TRUE(first.at(watch).whole);
  EXPECT_EQ(names_of(first.at(watch).written, prefix_.size()), std::vector<std::string>{"a=1"});
  EXPECT_TRUE(first.at(other).whole);
  const auto writer = client();
  for (int i = 0; i < 20; ++i) {
    const int64_t lease = writer->call({.kind = Kind::grant_lease, .ttl = 60s}).lease;
    writer->call({.kind = Kind::put, .key = key("b"), .value = std::to_string(i), .lease = lease});
    writer->call({.kind = Kind::revoke_lease, .lease = lease});
  }
  int64_t revision = first.at(watch).revision;
  for (int i = 0; i < 20; ++i) {
    const Change written = next_change(*registry_), erased = next_change(*registry_);
    EXPECT_FALSE(written.whole);
    EXPECT_EQ(names_of(written.written, prefix_.size()),
              std::vector<std::string>{"b=" + std::to_string(i)});
    EXPECT_EQ(written.written.at(0).revision, written.revision);
    EXPECT_GT(written.revision, revision);
    EXPECT_THAT(erased.erased, ElementsAre(key("b")));
    EXPECT_TRUE(erased.written.empty());
    EXPECT_GT(erased.revision, written.revision);
    revision = erased.revision;
  }
  registry_->unwatch(watch);
  writer->call({.kind = Kind::put, .key = key("b"), .value = "unseen"});
  writer->call({.kind = Kind::put, .key = "other/b", .value = std::string(GetParam())});
  EXPECT_EQ(next_change(*registry_).watch, other);
}

TEST_P(Registries, ARevokedLeaseTakesItsRecordsAlong) {
  const int64_t lease = grant(60s);
  put("a", "1", lease);
  put("b", "2", lease);
  put("c", "3");
  EXPECT_EQ(list().at(0).lease, lease);
  EXPECT_EQ(keep(lease), Outcome::done);
  registry_->watch(prefix_);
  EXPECT_EQ(next_change(*registry_).written.size(), 3U);
  const Request revoke{.kind = Kind::revoke_lease, .lease = lease};
  EXPECT_EQ(registry_->call(revoke).outcome, Outcome::done);
  EXPECT_THAT(next_change(*registry_).erased, ElementsAre(key("a")));
  EXPECT_THAT(next_change(*registry_).erased, ElementsAre(key("b")));
  EXPECT_EQ(registry_->call(revoke).outcome, Outcome::lease_gone);
  EXPECT_EQ(keep(lease), Outcome::lease_gone);
  EXPECT_EQ(put("a", "1", lease).outcome, Outcome::lease_gone);
  EXPECT_EQ(put("a", "1", lease, 0).outcome, Outcome::lease_gone);
  EXPECT_EQ(names_of(list(), prefix_.size()), std::vector<std::string>{"c=3"});
}

TEST_P(Registries, ALeaseEndsUnlessItIsKept) {
  const int64_t kept = grant(2s), left = grant(2s);
  put("kept", "1", kept);
  put("left", "1", left);
  registry_->watch(prefix_);
  EXPECT_EQ(next_change(*registry_).written.size(), 2U);
  const auto begin = Clock::now();
  std::optional<RegistryEvent> event;
  while (!event && Clock::now() < begin + kLimit) {
    EXPECT_EQ(keep(kept), Outcome::done);
    event = registry_->next_event(300ms);
  }
  ASSERT_TRUE(event);
  EXPECT_THAT(std::get<Change>(*event).erased, ElementsAre(key("left")));
  // etcd looks for leases that have ended every half second.
  EXPECT_GT(Clock::now() - begin, 1500ms);
  EXPECT_LT(Clock::now() - begin, 5s);
}

TEST_P(Registries, EventsCanBeWaitedForByPoll) {
  pollfd entry{registry_->descriptor(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
  registry_->submit({.kind = Kind::list, .key = key("x")});
  EXPECT_EQ(::poll(&entry, 1, 30'000), 1);
  EXPECT_TRUE(registry_->next_event(0ms));
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
}

TEST_P(Registries, ACallLeavesOtherEventsInTheQueue) {
  registry_->watch(prefix_);
  const uint64_t sent = registry_->submit({.kind = Kind::list, .key = key("x")});
  put("a", "1");
  std::map<bool, int> seen;
  while (seen[true] < 1 || seen[false] < 1) {
    const auto event = registry_->next_event(kLimit);
    ASSERT_TRUE(event);
    const auto* reply = std::get_if<Reply>(&*event);
    if (reply) {
      EXPECT_EQ(reply->request, sent);
    }
    ++seen[reply != nullptr];
  }
}

TEST_P(Registries, ARequestThatMakesNoSenseIsRefused) {
  try {
    registry_->call({.kind = Kind::put, .key = ""});
    FAIL();
  } catch (const RegistryError& error) {
    EXPECT_EQ(error.kind(), RegistryError::Kind::refused);
  }
  EXPECT_EQ(put("x", "1").outcome, Outcome::done);
}

INSTANTIATE_TEST_SUITE_P(Embedded, Registries, testing::Values("embedded", "token"));
INSTANTIATE_TEST_SUITE_P(Etcd, Registries, testing::Values("etcd"));

TEST(EtcdRegistry, WhereNobodyAnswersARequestFailsAfterItsTimeout) {
  const UniqueFd silent = listen_on("127.0.0.1", 0);
  const std::string nobody = "http://127.0.0.1:" + std::to_string([] {
                               const UniqueFd closed = listen_on("127.0.0.1", 0);
                               return bound_port(closed.get());
                             }());
  for (const auto& endpoint :
       {nobody, "http://127.0.0.1:" + std::to_string(bound_port(silent.get()))}) {
    const auto registry = call_registry({.endpoints = {endpoint}, .try_timeout = 100ms});
    registry->watch("a");
    const auto begin = Clock::now();
    try {
      registry->call({.kind = Kind::list, .key = "x", .timeout = 500ms});
      FAIL();
    } catch (const RegistryError& error) {
      EXPECT_EQ(error.kind(), RegistryError::Kind::unreachable);
    }
    EXPECT_GE(Clock::now() - begin, 490ms);
    EXPECT_LT(Clock::now() - begin, 3s);
    registry->submit({.kind = Kind::list, .key = "x"});
  }
}

TEST(EtcdRegistry, MistakesInOptionsAreUsageErrors) {
  using Options = EtcdRegistryOptions;
  for (const Options& options :
       {Options{}, Options{.endpoints = {"127.0.0.1:1"}}, Options{.endpoints = {"http://a"}},
        Options{.endpoints = {"http://a:1"}, .certificate = "/nowhere"}}) {
    EXPECT_THROW(call_registry(options), UsageError);
  }
}

}  // namespace registry_test
}  // namespace lockstep::elastic
