// One end of a connection for small calls, at whose other end anything happens.
#include "lockstep/rpc/socket_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/rpc/seal.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc::detail {
namespace socket_link_test {

using namespace std::chrono_literals;
using test_wait::wait_until;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kKey = "key of what comes in";

/// A link of rank 0, and the bare other end of its connection to rank 1.
struct End {
  explicit End(const std::string& key = {}) {
    int both[2] = {-1, -1};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) != 0) throw std::bad_alloc();
    other.reset(both[1]);
    const timeval most{5, 0};  // So that what does not end fails.
    setsockopt(both[1], SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    std::vector<SocketPeer> peers(2);
    peers[1].connection.reset(both[0]);
    peers[1].name = "rank 1";
    peers[1].key_in = peers[1].key_out = key;
    link = std::make_unique<SocketLink>(0, std::move(peers), /*has_processor=*/false);
  }
  void write(const std::string& bytes) const {
    ASSERT_EQ(::send(other.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), bytes.size());
  }
  FastCatch take() const {
    FastCatch caught;
    link->take(caught);
    return caught;
  }
  std::unique_ptr<SocketLink> link;
  UniqueFd other;
};

std::string message(uint64_t count, const std::string& bytes, const std::string& key = {}) {
  const SocketLink::WireHead head{static_cast<uint32_t>(bytes.size()), 1, count, 5};
  std::string text(reinterpret_cast<const char*>(&head), sizeof(head));
  text += bytes;
  return key.empty() ? text : text + hmac_sha256(key, text);
}

void expect_end(const End& end, const std::string& how) {
  EXPECT_THAT(end.take().lost, ElementsAre(1));
  EXPECT_TRUE(end.take().lost.empty()) << "it is told once";
  EXPECT_THAT(end.link->describe_end(1), HasSubstr(how));
  EXPECT_FALSE(end.link->send(1, {}, "x"));
  EXPECT_FALSE(end.link->look());
  char byte = 0;
  while (recv(end.other.get(), &byte, 1, 0) > 0) {
  }
  EXPECT_EQ(recv(end.other.get(), &byte, 1, 0), 0) << "the other end sees it as well";
}

TEST(SocketLink, MessagesInPiecesArriveWhole) {
  for (const std::string key : {"", kKey}) {
    const End end(key);
    const std::string all = message(0, "first", key) + message(1, "", key) +
                            message(2, std::string(SocketLink::kMostBytes, 'x'), key);
    std::vector<FastMessage> messages;
    for (size_t i = 0; i < all.size(); i += i < 200 ? 1 : 10'000) {
      end.write(all.substr(i, i < 200 ? 1 : 10'000));
      for (auto& one : end.take().messages) messages.push_back(std::move(one));
    }
    ASSERT_EQ(messages.size(), 3);
    EXPECT_EQ(messages[0].bytes, "first");
    EXPECT_EQ(messages[0].from, 1);
    EXPECT_EQ(messages[0].head.number, 5);
    EXPECT_EQ(messages[1].bytes, "");
    EXPECT_EQ(messages[2].bytes.size(), SocketLink::kMostBytes);
  }
}

TEST(SocketLink, WhatIsNoMessageEndsTheConnection) {
  std::string flipped = message(0, "text", kKey);
  flipped[45] ^= 1;
  const struct {
    const char* name;
    const char* key;
    std::string bytes;
  } cases[] = {
      {"too long", "", message(0, std::string(SocketLink::kMostBytes + 1, 'x')).substr(0, 60)},
      {"another number", "", message(1, "text")},
      {"text", "", std::string(100, 'x')},
      {"without a code", kKey, message(0, "text") + std::string(32, 'x')},
      {"with another code", kKey, message(0, "text", "another key")},
      {"changed", kKey, flipped},
      {"with the code of another number", kKey,
       message(1, "text", kKey).replace(8, 8, std::string(8, '\0'))},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    const End end(c.key);
    end.write(c.bytes);
    expect_end(end, "brought what is no message");
  }
}

TEST(SocketLink, NoMessageCountsTwice) {
  const End end(kKey);
  end.write(message(0, "text", kKey));
  EXPECT_EQ(end.take().messages.size(), 1);
  end.write(message(0, "text", kKey));
  expect_end(end, "brought what is no message");
}

TEST(SocketLink, AnEndedConnectionIsToldWithWhatCameBefore) {
  End end;
  end.write(message(0, "text") + message(1, "more").substr(0, 20));
  EXPECT_EQ(end.take().messages.size(), 1);
  end.other.reset();
  EXPECT_TRUE(end.link->look());
  EXPECT_THAT(end.take().lost, ElementsAre(1));
  EXPECT_THAT(end.link->describe_end(1), HasSubstr("rank 1 has ended"));
}

TEST(SocketLink, ASlowReaderGetsNoMore) {
  const End end;
  const std::string most(SocketLink::kMostBytes, 'x');
  size_t sent = 0;
  while (end.link->send(1, {}, most)) ASSERT_LT(++sent, 100);
  // What was taken comes when there is room again.
  size_t read = 0;
  std::string buffer(1 << 20, '\0');
  const size_t all = sent * (most.size() + sizeof(SocketLink::WireHead));
  wait_until(
      [&] {
        end.take();
        const ssize_t got = recv(end.other.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (got > 0) read += static_cast<size_t>(got);
        return read == all;
      },
      "what had to wait");
  EXPECT_TRUE(end.link->send(1, {}, most));
}

TEST(SocketLink, AnyBytesEndAtMostTheConnection) {
  const auto given = env_string("LOCKSTEP_FUZZ_SEED");
  const uint64_t seed = given ? std::stoull(*given) : std::random_device{}();
  std::printf("LOCKSTEP_FUZZ_SEED=%llu\n", static_cast<unsigned long long>(seed));
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  int ended = 0;
  for (int i = 0; i < 300; ++i) {
    const End end;
    std::string bytes;
    for (uint64_t n = 0; n < 20; ++n) bytes += message(n, std::string(random() % 300, 'x'));
    for (uint64_t n = random() % 4; n > 0; --n) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    end.write(bytes);
    size_t messages = 0;
    while (end.link->look()) {
      const FastCatch caught = end.take();
      messages += caught.messages.size();
      ended += static_cast<int>(caught.lost.size());
    }
    EXPECT_LE(messages, 20);
  }
  EXPECT_GT(ended, 10);
}

TEST(SocketLink, OneThreadIsWokenTheFirstInOrder) {
  const End end;
  std::atomic<bool> poller_woken{false}, caller_woken{false}, caller_sleeps{false};
  const auto sleep = [&](FastLink::Waiter waiter, std::atomic<bool>& woken) {
    const auto entered = [&] {
      if (waiter == FastLink::caller) caller_sleeps = true;
      return false;
    };
    end.link->sleep(waiter, entered, 60s);
    woken = true;
  };
  std::thread poller([&] { sleep(FastLink::poller, poller_woken); });
  std::thread caller([&] { sleep(FastLink::caller, caller_woken); });
  wait_until([&] { return caller_sleeps.load(); }, "the caller to lie down");
  end.write(message(0, "text"));
  wait_until([&] { return caller_woken.load(); }, "the caller to be woken");
  caller.join();
  // Nobody has taken the message out: now it wakes the next.
  wait_until([&] { return poller_woken.load(); }, "the poller to be woken");
  poller.join();
  EXPECT_EQ(end.take().messages.size(), 1);
}

TEST(SocketLink, WhileOneLooksNobodyIsWoken) {
  const End end;
  end.link->begin_look();
  end.write(message(0, "text"));
  const auto begin = std::chrono::steady_clock::now();
  const auto sleep = [&] {
    end.link->sleep(
        FastLink::poller, [] { return false; }, 200ms);
    return std::chrono::steady_clock::now() - begin;
  };
  EXPECT_GE(sleep(), 200ms);
  end.link->end_look();
  sleep();  // It wakes at once, as nobody looks any more.
  EXPECT_EQ(end.take().messages.size(), 1);
}

}  // namespace socket_link_test
}  // namespace lockstep::rpc::detail
