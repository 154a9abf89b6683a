#include "lockstep/comm/backends/hierarchical/host_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/error.h"
#include "tests/support/run_ranks.h"
#include "tests/support/test_wait.h"

namespace lockstep::hierarchical {
namespace host_links_test {

using test::expect_ok;
using test::rethrow_first;
using test::run_ranks;
using test_wait::wait_until;
using ::testing::HasSubstr;
using AllLinks = std::vector<std::unique_ptr<HostLinks>>;

HostLinks::Options options_of(const c10::intrusive_ptr<c10d::Store>& store, int host, int hosts,
                              int milliseconds = 20'000) {
  HostLinks::Options options;
  options.store = store;
  options.host = host;
  for (int other = 0; other < hosts; ++other)
    options.names.push_back("the leader of host " + std::to_string(other));
  options.timeout = std::chrono::milliseconds(milliseconds);
  return options;
}

AllLinks joined(int hosts) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  AllLinks lines(static_cast<size_t>(hosts));
  rethrow_first(run_ranks(hosts, [&](int host) {
    lines[static_cast<size_t>(host)] = std::make_unique<HostLinks>(options_of(store, host, hosts));
  }));
  return lines;
}

/// What was told of others; outlives the links.
class Told {
 public:
  void watch(HostLinks& links) {
    links.watch({.failed = [this](const Failure& failure) { add(failed_, failure); },
                 .left = [this](const Failure& left) { add(left_, left); },
                 .lost =
                     [this](int host, const std::string& why) {
                       const std::lock_guard lock(mutex_);
                       lost_[host] = why;
                     },
                 .tick = [] {}});
  }
  std::map<int, std::string> lost() const { return copy(lost_); }
  std::vector<Failure> failed() const { return copy(failed_); }
  std::vector<Failure> left() const { return copy(left_); }

 private:
  void add(std::vector<Failure>& list, const Failure& failure) {
    const std::lock_guard lock(mutex_);
    list.push_back(failure);
  }
  template <class T>
  T copy(const T& what) const {
    const std::lock_guard lock(mutex_);
    return what;
  }
  mutable std::mutex mutex_;
  std::map<int, std::string> lost_;
  std::vector<Failure> failed_, left_;
};

TEST(HostLinks, ABreakIsToldAtOnceToAllOthersAndOnce) {
  Told first, last;
  auto lines = joined(3);
  first.watch(*lines[0]);
  lines[1].reset();
  last.watch(*lines[2]);  // It broke before.
  wait_until([&] { return first.lost().size() == 1 && last.lost().size() == 1; }, "the losses",
             std::chrono::seconds(5));
  EXPECT_EQ(first.lost().count(1), 1u);
  EXPECT_EQ(last.lost().count(1), 1u);
  EXPECT_FALSE(first.lost().at(1).empty());
}

TEST(HostLinks, OneThatWasClosedIsNoLoss) {
  Told told;
  auto lines = joined(3);
  told.watch(*lines[0]);
  lines[1]->close();
  lines[1].reset();
  lines[2].reset();  // A loss, which is told after what came before it.
  wait_until([&] { return !told.lost().empty(); }, "the loss of host 2", std::chrono::seconds(5));
  lines[0]->close();
  EXPECT_EQ(told.lost().count(1), 0u);
  EXPECT_EQ(told.lost().count(2), 1u);
}

TEST(HostLinks, WhatIsToldComesWhole) {
  for (int round = 0; round < 50; ++round) {
    Told told[2];
    auto lines = joined(3);
    for (size_t host = 0; host < 2; ++host) told[host].watch(*lines[host]);
    Failure failure{.kind = Failure::Kind::ended, .ranks = {{.number = round}}};
    failure.detail = std::string(static_cast<size_t>(1 + round * 30), 'a');
    lines[2]->tell_left({.kind = Failure::Kind::left, .ranks = {{.number = 7, .calls = round}}});
    lines[2]->tell_failed(failure);
    round % 2 ? lines[2].reset() : lines[2]->close();
    for (const Told& one : told) {
      wait_until([&] { return !one.failed().empty(); }, "the failure");
      EXPECT_EQ(one.failed().at(0).ranks, failure.ranks);
      EXPECT_EQ(one.failed().at(0).detail, failure.detail);
      EXPECT_EQ(one.left().at(0).ranks.at(0).calls, round);
    }
  }
}

TEST(HostLinks, BothSidesMayCloseAtOnce) {
  for (int round = 0; round < 50; ++round) {
    Told told[2];
    auto lines = joined(2);
    for (size_t host = 0; host < 2; ++host) told[host].watch(*lines[host]);
    expect_ok(run_ranks(2, [&](int host) { lines[static_cast<size_t>(host)]->close(); }));
    EXPECT_TRUE(told[0].lost().empty() && told[1].lost().empty()) << "round " << round;
  }
}

TEST(HostLinks, WhoDoesNotComeIsNamed) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  try {
    const HostLinks line(options_of(store, 0, 2, 300));
    ADD_FAILURE() << "host 0 met nobody";
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the leader of host 1 did not come within 0.3 s"));
  }
}

TEST(HostLinks, WhoIsWaitedForIsLookedAfter) {
  auto options = options_of(c10::make_intrusive<c10d::HashStore>(), 0, 3);
  options.look = [](const std::vector<int>& hosts) {
    EXPECT_EQ(hosts, (std::vector<int>{1, 2}));
    throw PeerLostError("the leader of host 1 has ended");
  };
  EXPECT_THROW(HostLinks{options}, PeerLostError);
}

// Its socket is gone with it, though the store still tells where it was.
TEST(HostLinks, WhoEndedAfterItToldWhereItListensIsLookedAfter) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(HostLinks(options_of(store, 0, 2, 1)), TimeoutError);
  auto options = options_of(store, 1, 2);
  options.look = [](const std::vector<int>& hosts) {
    EXPECT_EQ(hosts, std::vector<int>{0});
    throw PeerLostError("the leader of host 0 has ended");
  };
  EXPECT_THROW(HostLinks{options}, PeerLostError);
}

TEST(HostLinks, AStrangerIsNotTakenForALeader) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  // Host 1 as one who does not know the secret, which host 0 made up.
  std::thread stranger([&] {
    store->wait({"0"}, std::chrono::seconds(20));
    const c10::intrusive_ptr<c10d::Store> other = c10::make_intrusive<c10d::HashStore>();
    other->set("secret", std::string(32, '0'));
    other->set("0", store->get_to_str("0"));
    EXPECT_THROW(HostLinks(options_of(other, 1, 2, 2'000)), CommError);
  });
  EXPECT_THROW(HostLinks(options_of(store, 0, 2, 1'000)), TimeoutError);
  stranger.join();
}

}  // namespace host_links_test
}  // namespace lockstep::hierarchical
