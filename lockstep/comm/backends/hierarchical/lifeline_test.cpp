#include "lockstep/comm/backends/hierarchical/lifeline.h"

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
namespace lifeline_test {

using test::expect_ok;
using test::rethrow_first;
using test::run_ranks;
using test_wait::wait_until;
using ::testing::HasSubstr;
using Lines = std::vector<std::unique_ptr<Lifeline>>;

Lifeline::Options options_of(const c10::intrusive_ptr<c10d::Store>& store, int host, int hosts,
                             int milliseconds = 20'000) {
  Lifeline::Options options;
  options.store = store;
  options.host = host;
  for (int other = 0; other < hosts; ++other)
    options.names.push_back("the leader of host " + std::to_string(other));
  options.timeout = std::chrono::milliseconds(milliseconds);
  return options;
}

Lines joined(int hosts) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Lines lines(static_cast<size_t>(hosts));
  rethrow_first(run_ranks(hosts, [&](int host) {
    lines[static_cast<size_t>(host)] = std::make_unique<Lifeline>(options_of(store, host, hosts));
  }));
  return lines;
}

/// What a lifeline told of others; outlives it.
class Losses {
 public:
  void watch(Lifeline& line) {
    line.watch(
        [this](const Lifeline::Break& broken) {
          const std::lock_guard lock(mutex_);
          whys_[broken.host] = broken.why;
          words_[broken.host] = broken.last_words;
        },
        [] {});
  }
  std::map<int, std::string> all() const {
    const std::lock_guard lock(mutex_);
    return whys_;
  }
  std::string last_words_of(int host) const {
    const std::lock_guard lock(mutex_);
    return words_.at(host);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::string> whys_, words_;
};

TEST(Lifeline, ABreakIsToldAtOnceToAllOthersAndOnce) {
  Losses first, last;
  auto lines = joined(3);
  first.watch(*lines[0]);
  last.watch(*lines[2]);
  lines[1].reset();
  wait_until([&] { return first.all().size() == 1 && last.all().size() == 1; }, "the losses",
             std::chrono::seconds(5));
  EXPECT_EQ(first.all().count(1), 1u);
  EXPECT_EQ(last.all().count(1), 1u);
  EXPECT_FALSE(first.all().at(1).empty());
}

TEST(Lifeline, AGoodByeIsNoLoss) {
  Losses losses;
  auto lines = joined(3);
  losses.watch(*lines[0]);
  lines[1]->close();
  lines[1].reset();
  lines[2].reset();  // A loss, which is told after what came before it.
  wait_until([&] { return !losses.all().empty(); }, "the loss of host 2", std::chrono::seconds(5));
  lines[0]->close();
  EXPECT_EQ(losses.all().count(1), 0u);
  EXPECT_EQ(losses.all().count(2), 1u);
}

TEST(Lifeline, LastWordsComeWithTheBreak) {
  for (int round = 0; round < 50; ++round) {
    Losses losses[2];
    auto lines = joined(3);
    for (size_t host = 0; host < 2; ++host) losses[host].watch(*lines[host]);
    const std::string word(static_cast<size_t>(1 + round * 79),
                           static_cast<char>('a' + round % 26));
    lines[2].reset();
    lines[1]->break_off(word);
    wait_until([&] { return losses[0].all().size() == 2; }, "both breaks");
    EXPECT_EQ(losses[0].last_words_of(1), word);
    EXPECT_EQ(losses[0].last_words_of(2), "");
  }
}

TEST(Lifeline, LastWordsAreNoGoodByeAndAreCut) {
  auto lines = joined(2);
  lines[1]->break_off(std::string(9'000, 'F'));
  std::optional<Lifeline::Break> broken;
  wait_until([&] { return (broken = lines[0]->broken()).has_value(); }, "the break");
  EXPECT_EQ(broken->last_words, std::string(4'000, 'F'));
}

TEST(Lifeline, AGoodByeHoldsThoughTheOtherSaidItAsWell) {
  for (int round = 0; round < 50; ++round) {
    Losses losses[2];
    auto lines = joined(2);
    for (size_t host = 0; host < 2; ++host) losses[host].watch(*lines[host]);
    expect_ok(run_ranks(2, [&](int host) { lines[static_cast<size_t>(host)]->close(); }));
    EXPECT_TRUE(losses[0].all().empty() && losses[1].all().empty()) << "round " << round;
  }
}

TEST(Lifeline, WhatBrokeBeforeIsFoundOrToldByTheWatch) {
  Losses losses;
  auto lines = joined(3);
  EXPECT_FALSE(lines[0]->broken());
  lines[1].reset();
  std::optional<Lifeline::Break> broken;
  wait_until([&] { return (broken = lines[0]->broken()).has_value(); }, "the break",
             std::chrono::seconds(5));
  EXPECT_EQ(broken->host, 1);
  losses.watch(*lines[2]);
  wait_until([&] { return losses.all().count(1) == 1; }, "the loss", std::chrono::seconds(5));
}

TEST(Lifeline, WhoDoesNotComeIsNamed) {
  for (const int alone : {0, 1}) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    try {
      const Lifeline line(options_of(store, alone, 2, 300));
      ADD_FAILURE() << "host " << alone << " met nobody";
    } catch (const TimeoutError& error) {
      const std::string other = "the leader of host " + std::to_string(1 - alone);
      EXPECT_THAT(error.what(), HasSubstr(other + " did not come within 0.3 s"));
    }
  }
}

TEST(Lifeline, WhoIsWaitedForIsLookedAfter) {
  auto options = options_of(c10::make_intrusive<c10d::HashStore>(), 0, 3);
  options.look = [](const std::vector<int>& hosts) {
    EXPECT_EQ(hosts, (std::vector<int>{1, 2}));
    throw PeerLostError("the leader of host 1 has ended");
  };
  EXPECT_THROW(Lifeline{options}, PeerLostError);
}

// Its socket is gone with it, though the store still tells where it was.
TEST(Lifeline, WhoEndedAfterItToldWhereItListensIsLookedAfter) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(Lifeline(options_of(store, 0, 2, 1)), TimeoutError);
  auto options = options_of(store, 1, 2);
  options.look = [](const std::vector<int>& hosts) {
    EXPECT_EQ(hosts, std::vector<int>{0});
    throw PeerLostError("the leader of host 0 has ended");
  };
  EXPECT_THROW(Lifeline{options}, PeerLostError);
}

TEST(Lifeline, AStrangerIsNotTakenForALeader) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  // Host 1 as one who does not know the token, which host 0 made up.
  std::thread stranger([&] {
    store->wait({"0"}, std::chrono::seconds(20));
    const std::string place = store->get_to_str("0");
    const c10::intrusive_ptr<c10d::Store> other = c10::make_intrusive<c10d::HashStore>();
    other->set("0", place.substr(0, place.find(' ')) + " " + std::string(32, '0') +
                        place.substr(place.rfind(' ')));
    Lifeline line(options_of(other, 1, 2, 2'000));
  });
  EXPECT_THROW(Lifeline(options_of(store, 0, 2, 1'000)), TimeoutError);
  stranger.join();
}

}  // namespace lifeline_test
}  // namespace lockstep::hierarchical
