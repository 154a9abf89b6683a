// How two ends of a connection for small calls get to know each other, among strangers.
#include "lockstep/rpc/socket_meeting.h"

#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <future>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/socket.h"
#include "lockstep/rpc/fast_meeting.h"
#include "lockstep/rpc/seal.h"
#include "tests/support/message_of.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc::detail {
namespace socket_meeting_test {

using namespace std::chrono_literals;
using lockstep::test::message_of;
using test_wait::wait_until;
using ::testing::HasSubstr;

std::shared_ptr<FastLink> meet_as(const Store& store, int rank, const std::string& secret) {
  return meet(store.clone(),
              {.rank = rank, .size = 2, .shared_memory = false, .secret = secret, .job = "job"});
}

using State = Handshake::State;

State until_it_ends(Handshake& handshake) {
  wait_until([&] { return handshake.go_on() != State::talks; }, "the other end's words");
  return handshake.go_on();
}

struct Endpoint {
  std::string host;
  uint16_t port = 0;
  UniqueFd connect(std::chrono::milliseconds timeout = 10s) const {
    return connect_to(host, port, timeout);
  }
};

Endpoint endpoint_of(const std::string& address) {
  const size_t space = address.find(' ');
  return {address.substr(0, space), static_cast<uint16_t>(std::stoi(address.substr(space + 1)))};
}

TEST(SocketMeeting, AnotherSecretGetsNoConnection) {
  Store store = hash_store();
  auto other =
      std::async(std::launch::async, [&] { return meet_as(store, 1, "another secret!!"); });
  EXPECT_EQ(meet_as(store, 0, "sixteen letters!"), nullptr);
  EXPECT_EQ(other.get(), nullptr);
}

// Two seconds for each, one after the other, would be longer than a meeting takes at most.
TEST(SocketMeeting, StrangersHoldNobodyUp) {
  if (env_string("LOCAL_RANK")) return;  // A worker that a later test has started passes by.
  Store store = hash_store();
  auto first = std::async(std::launch::async, [&] { return meet_as(store, 0, ""); });
  store.set("fast/wish/1", "TCP");  // So it listens before the other comes.
  const Endpoint endpoint = endpoint_of(store.get("fast/TCP/address/0"));
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(endpoint.connect());
    if (i % 3 == 0) continue;  // It says nothing.
    const std::string text(static_cast<size_t>(i % 3) * 200, 'x');
    ASSERT_EQ(send(strangers.back().get(), text.data(), text.size(), MSG_NOSIGNAL), text.size());
  }
  const auto second = meet_as(store, 1, "");
  const auto made = first.get();
  ASSERT_NE(made, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(made->send(1, {}, "text", FastLink::WhenFull::keep));
  wait_until([&] { return second->look(); }, "the message");
}

// 600 say nothing and stay; behind them others come without end, and hang up at once.
TEST(SocketMeeting, AFloodOfStrangersKeepsNobodyOut) {
  if (env_string("LOCAL_RANK")) return;
  Store store = hash_store();
  auto first = std::async(std::launch::async, [&] { return meet_as(store, 0, ""); });
  store.set("fast/wish/1", "TCP");
  const Endpoint endpoint = endpoint_of(store.get("fast/TCP/address/0"));
  std::atomic<int> come{0};
  std::atomic<bool> over{false};
  auto flood = std::async(std::launch::async, [&] {
    std::vector<UniqueFd> strangers;
    while (!over) {
      try {
        strangers.push_back(endpoint.connect(200ms));
      } catch (const Error&) {  // As many wait as the listener takes, or the meeting is over.
        continue;
      }
      if (strangers.size() > 600) strangers.pop_back();
      ++come;
    }
  });
  const auto stop = c10::make_scope_exit([&] {
    over = true;
    flood.wait();
  });
  wait_until([&] { return come > 700; }, "the flood");
  auto comes = std::async(std::launch::async, [&] { return meet_as(store, 1, ""); });
  EXPECT_EQ(comes.wait_for(10s), std::future_status::ready) << "strangers take its time";
  const auto made = first.get();
  const auto second = comes.get();
  ASSERT_NE(made, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(made->send(1, {}, "text", FastLink::WhenFull::keep));
  wait_until([&] { return second->look(); }, "the message");
}

// All of them wait to be let in, the rank behind them; this process may open eight files more.
TEST(SocketMeeting, WithTooManyOpenFilesStrangersGoBeforeARank) {
  if (env_string("LOCAL_RANK")) return;
  SocketMeeting meeting(0, 2, "", "job");
  const std::string address = meeting.listen("127.0.0.1");
  const Endpoint endpoint = endpoint_of(address);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(endpoint.connect());
  UniqueFd rank = endpoint.connect();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto restore = c10::make_scope_exit([limit] { setrlimit(RLIMIT_NOFILE, &limit); });
  const rlimit low{static_cast<rlim_t>(rank.get()) + 9, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  auto meets = std::async(std::launch::async, [&] {
    return meeting.connect({address, address}, 60s, [] {});
  });
  Handshake calls(std::move(rank), 1, 0, 0, hmac_sha256("", "small calls of job"));
  EXPECT_EQ(until_it_ends(calls), State::known);
  EXPECT_TRUE(meets.get().at(1).connection);
}

/// A rank 0 whose answers a test gives by hand.
class RankZero {
 public:
  std::string address() const {
    return "127.0.0.1 " + std::to_string(bound_port(listener_.get())) + " 1:2:3";
  }
  UniqueFd next_call() {
    UniqueFd connection = accept_from(listener_.get(), 20s);
    if (!connection) throw TimeoutError("nobody has called");
    return connection;
  }
  static Handshake called_at(UniqueFd connection, const std::string& job = "job") {
    return {std::move(connection), 0, 1, 2, hmac_sha256("", "small calls of " + job)};
  }
  Handshake answer(const std::string& job = "job") { return called_at(next_call(), job); }

 private:
  UniqueFd listener_ = listen_on("127.0.0.1", 0);
};

void wait_for_word(int connection) {
  pollfd entry{connection, POLLIN, 0};
  ASSERT_EQ(poll(&entry, 1, 20'000), 1);
}

/// Both ends of a connection, which do not block.
std::pair<UniqueFd, UniqueFd> connection() {
  int both[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, both) != 0)
    throw std::bad_alloc();
  return {UniqueFd(both[0]), UniqueFd(both[1])};
}

void forward(const UniqueFd& from, const UniqueFd& to, size_t bytes) {
  while (bytes > 0) {
    ASSERT_NO_FATAL_FAILURE(wait_for_word(from.get()));
    char byte = 0;
    ASSERT_EQ(recv(from.get(), &byte, 1, MSG_DONTWAIT), 1);
    ASSERT_EQ(::send(to.get(), &byte, 1, MSG_NOSIGNAL), 1);
    --bytes;
  }
}

/// Rank 1's meeting with it, of `size` ranks, on a thread of its own.
std::future<std::vector<SocketPeer>> meet_with(const RankZero& zero, int size) {
  return std::async(std::launch::async, [&zero, size] {
    SocketMeeting meeting(1, size, "", "job");
    std::vector<std::string> addresses(static_cast<size_t>(size));
    addresses[0] = zero.address();
    addresses[1] = meeting.listen("127.0.0.1");
    return meeting.connect(addresses, 60s, [] {});
  });
}

TEST(SocketMeeting, WhoWasHungUpOnCallsAgain) {
  RankZero zero;
  auto meets = meet_with(zero, 2);
  zero.answer();  // And hangs up.
  {
    // It has heard hello and proof and shown its own: without a last word that is no connection.
    const UniqueFd caller = zero.next_call();
    auto [near, far] = connection();
    Handshake visitor = RankZero::called_at(std::move(far));
    forward(caller, near, sizeof(Session::Hello));
    EXPECT_EQ(visitor.go_on(), State::talks);
    forward(near, caller, sizeof(Session::Hello) + visitor.session().proof("", "").size());
    wait_for_word(caller.get());
  }
  Handshake visitor = zero.answer();
  EXPECT_EQ(until_it_ends(visitor), State::known);
  EXPECT_EQ(visitor.rank(), 1);
  EXPECT_TRUE(meets.get()[0].connection);
}

// Rank 2 never comes: to wait for it first would take half a minute, and end by another error.
TEST(SocketMeeting, ACallThatFailsEndsTheWaitForOthers) {
  RankZero zero;
  auto meets = meet_with(zero, 3);
  Handshake visitor = zero.answer("another job");
  EXPECT_THAT(message_of<CommError>([&] {
                until_it_ends(visitor);
                meets.get();
              }),
              HasSubstr("does not answer as a rank of this job"));
}

// A rank 0 that is stopped says nothing: the end of the meeting does not wait for it.
TEST(SocketMeeting, WhatFailsHereEndsACallThatWaits) {
  RankZero zero;
  std::atomic<bool> fails{false};
  auto meets = std::async(std::launch::async, [&] {
    SocketMeeting meeting(1, 2, "", "job");
    const std::vector<std::string> addresses{zero.address(), meeting.listen("127.0.0.1")};
    meeting.connect(addresses, 60s, [&] {
      if (fails) throw CommError("rank 2 has failed");
    });
  });
  Handshake silent = zero.answer();
  wait_for_word(silent.descriptor());
  fails = true;
  EXPECT_EQ(meets.wait_for(15s), std::future_status::ready) << "it waits for its half a minute";
  EXPECT_THAT(message_of<CommError>([&] { meets.get(); }), HasSubstr("rank 2 has failed"));
}

/// How both ends find each other. Who does not know the other hangs up.
std::pair<State, State> talk(Handshake& one, Handshake& other) {
  const auto is_over = [](Handshake& end) {
    if (end.go_on() != State::talks && end.go_on() != State::known) end.take_connection();
    return end.go_on() != State::talks;
  };
  wait_until(
      [&] {
        const bool one_is_over = is_over(one);
        return is_over(other) && one_is_over;
      },
      "the handshake");
  return {one.go_on(), other.go_on()};
}

/// Rank `caller` with that key calls rank `called`, and gets to rank `answers` of 4 with "key".
std::pair<State, State> greet(const std::string& key, int caller, int called, int answers) {
  auto [near, far] = connection();
  Handshake one(std::move(near), caller, called, called, key);
  Handshake other(std::move(far), answers, answers + 1, 3, "key");
  return talk(one, other);
}

TEST(SocketHandshake, EndsKnowEachOtherByTheKeyAndTheRank) {
  EXPECT_EQ(greet("key", 1, 0, 0), std::pair(State::known, State::known));
  EXPECT_EQ(greet("key", 3, 2, 2), std::pair(State::known, State::known));
  EXPECT_EQ(greet("another", 1, 0, 0), std::pair(State::a_stranger, State::hung_up));
  EXPECT_EQ(greet("key", 2, 1, 0), std::pair(State::a_stranger, State::hung_up)) << "it is rank 0";
  EXPECT_EQ(greet("key", 4, 0, 0), std::pair(State::hung_up, State::a_stranger)) << "no rank 4";
  EXPECT_EQ(greet("key", 1, 0, 1).second, State::a_stranger) << "the lower rank is called";
}

// The called end shows its proof first. So one without the key has to be found by a caller that
// does not look.
TEST(SocketHandshake, TheCalledEndTakesNobodyWithoutTheKey) {
  auto [near, far] = connection();
  Handshake other(std::move(far), 0, 1, 2, "key");
  Session session;
  {
    auto [caller, relay] = connection();
    const Handshake says_hello(std::move(caller), 1, 0, 0, "another");
    session = says_hello.session();
    forward(relay, near, sizeof(Session::Hello));
  }
  EXPECT_EQ(other.go_on(), State::talks);
  const std::string proof = session.proof("another", "higher");
  ASSERT_EQ(send(near.get(), proof.data(), proof.size(), 0), proof.size());
  EXPECT_EQ(other.go_on(), State::a_stranger);
}

TEST(SocketHandshake, WordsMayComeByteByByte) {
  auto [near, relay_near] = connection();
  auto [far, relay_far] = connection();
  Handshake one(std::move(near), 1, 0, 0, "key"), other(std::move(far), 0, 1, 1, "key");
  const auto pass = [](const UniqueFd& from, const UniqueFd& to) {
    char byte = 0;
    return recv(from.get(), &byte, 1, MSG_DONTWAIT) == 1 && send(to.get(), &byte, 1, 0) == 1;
  };
  wait_until(
      [&] {
        pass(relay_near, relay_far);
        pass(relay_far, relay_near);
        const bool is_over = one.go_on() != State::talks;
        return other.go_on() != State::talks && is_over;
      },
      "the handshake");
  EXPECT_EQ(one.go_on(), State::known);
  EXPECT_EQ(other.go_on(), State::known);
}

TEST(SocketHandshake, AMessageRightBehindTheLastWordIsLeft) {
  auto [near, far] = connection();
  Handshake one(std::move(near), 1, 0, 0, "key"), other(std::move(far), 0, 1, 1, "key");
  wait_until([&] { return one.go_on() != State::talks || other.go_on() != State::talks; },
             "the last word");
  ASSERT_EQ(other.go_on(), State::known);
  EXPECT_EQ(send(other.descriptor(), "message", 7, 0), 7);
  EXPECT_EQ(one.go_on(), State::known);
  char text[8] = {};
  EXPECT_EQ(recv(one.descriptor(), text, 7, 0), 7);
  EXPECT_STREQ(text, "message");
}

}  // namespace socket_meeting_test
}  // namespace lockstep::rpc::detail
