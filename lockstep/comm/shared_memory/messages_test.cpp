#include "lockstep/comm/shared_memory/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <functional>
#include <iostream>
#include <random>

#include "lockstep/base/error.h"
#include "tests/support/messages_world.h"

namespace lockstep::shm {
namespace messages_test {

using namespace messages_world;
using test::failure_in;
using test::tells;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// 0, 1, about the eager limit, about a piece, and more than the ring.
std::vector<size_t> sizes_of(Messages& messages) {
  const size_t eager = MessagesProbe{messages}.eager_bytes();
  const size_t chunk = MessagesProbe{messages}.chunk_bytes();
  return {0,         1,         23,    24,        25,        eager - 1,     eager,
          eager + 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 50 * chunk + 7};
}

class MessagesRings : public ::testing::TestWithParam<size_t> {};

TEST_P(MessagesRings, EverySizeWhicheverSideIsFirst) {
  World world(2, GetParam());
  uint64_t seed = 0;
  for (const size_t size : sizes_of(world[0])) {
    for (const bool send_first : {true, false}) {
      Bytes sent = pattern(size, ++seed);
      Bytes got(size);
      MessagePtr send;
      if (send_first) send = isend(world[0], 1, sent);
      const MessagePtr recv = irecv(world[1], 0, got);
      if (!send_first) send = isend(world[0], 1, sent);
      recv->wait(kLong);
      send->wait(kLong);
      EXPECT_EQ(sent, got) << size;
      EXPECT_EQ(recv->source(), 0);
    }
  }
}

TEST_P(MessagesRings, BothSendLargeOnesFirst) {
  World world(2, GetParam());
  expect_ok(run_ranks(2, [&](int rank) {
    for (uint64_t round = 0; round < 5; ++round) {
      const size_t size = 3 * GetParam() + round;
      Bytes out = pattern(size, 10 * round + static_cast<uint64_t>(rank));
      Bytes in(size);
      const auto send = isend(world[rank], 1 - rank, out);
      const auto recv = irecv(world[rank], 1 - rank, in);
      (round % 2 ? send : recv)->wait(kLong);
      (round % 2 ? recv : send)->wait(kLong);
      EXPECT_EQ(in, pattern(size, 10 * round + static_cast<uint64_t>(1 - rank)));
    }
  }));
}

TEST_P(MessagesRings, TagsAreApartAndInAnyOrder) {
  World world(2, GetParam());
  for (const size_t size : {size_t{8}, 5 * GetParam()}) {
    expect_ok(run_ranks(2, [&](int rank) {
      Bytes one = pattern(size, 1);
      Bytes two = pattern(size, 2);
      if (rank == 0) {
        const auto first = isend(world[0], 1, one, {.tag = 1});
        const auto second = isend(world[0], 1, two, {.tag = 2});
        second->wait(kLong);
        first->wait(kLong);
      } else {
        Bytes got(size);
        irecv(world[1], 0, got, {.tag = 2})->wait(kLong);
        EXPECT_EQ(got, two);
        irecv(world[1], 0, got, {.tag = 1})->wait(kLong);
        EXPECT_EQ(got, one);
      }
    }));
  }
}

TEST_P(MessagesRings, OneTagKeepsItsOrderWhateverTheSizes) {
  World world(2, GetParam());
  const std::vector<size_t> sizes = sizes_of(world[0]);
  constexpr size_t kMessages = 100;
  expect_ok(run_ranks(2, [&](int rank) {
    std::vector<Bytes> buffers;
    for (size_t i = 0; i < kMessages; ++i) buffers.push_back(pattern(sizes[i % sizes.size()], i));
    std::vector<MessagePtr> all;
    if (rank == 0) {
      for (auto& buffer : buffers) all.push_back(isend(world[0], 1, buffer));
      for (const auto& message : all) message->wait(kLong);
    } else {
      for (size_t i = 0; i < kMessages; ++i) {
        Bytes got(buffers[i].size());
        irecv(world[1], 0, got)->wait(kLong);
        EXPECT_EQ(got, buffers[i]) << i;
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Bytes, MessagesRings, ::testing::Values(4096, 64 << 10),
                         [](const auto& info) { return std::to_string(info.param); });

TEST(Messages, PingPong) {
  World world(2);
  expect_ok(run_ranks(2, [&](int rank) {
    for (unsigned char i = 0; i < 200; ++i) {
      Bytes ball(8, i);
      Bytes got(8);
      if (rank == 0) isend(world[0], 1, ball)->wait(kLong);
      irecv(world[rank], 1 - rank, got)->wait(kLong);
      if (rank == 1) isend(world[1], 0, got)->wait(kLong);
      EXPECT_EQ(got, ball);
    }
  }));
}

TEST(Messages, FromAny) {
  constexpr int kRanks = 4;
  constexpr int kEach = 50;
  World world(kRanks);
  expect_ok(run_ranks(kRanks, [&](int rank) {
    if (rank > 0) {
      for (int i = 0; i < kEach; ++i) {
        Bytes out(static_cast<size_t>(i % 2 ? 8 : 100'000), static_cast<unsigned char>(i));
        isend(world[rank], 0, out, {.tag = i % 2})->wait(kLong);
      }
      return;
    }
    std::vector<int> next(kRanks, 0);
    for (int i = 0; i < (kRanks - 1) * kEach; ++i) {
      const int tag = i % 2;
      Bytes in(static_cast<size_t>(tag ? 8 : 100'000));
      const auto recv = irecv(world[0], Messages::kAnyRank, in, {.tag = tag});
      recv->wait(kLong);
      ASSERT_GT(recv->source(), 0);
      int& number = next[static_cast<size_t>(recv->source())];
      EXPECT_EQ(number % 2, tag);
      EXPECT_EQ(in.back(), number++);
    }
  }));
}

TEST(Messages, ToOneself) {
  for (const int size : {1, 2}) {
    World world(size);
    Bytes sent = pattern(100'000, 3);
    Bytes got(sent.size());
    const auto send = isend(world[0], 0, sent);
    EXPECT_FALSE(send->done());
    irecv(world[0], 0, got)->wait(kLong);
    send->wait(kLong);
    EXPECT_EQ(sent, got);
    got.assign(got.size(), 0);
    const auto recv = irecv(world[0], Messages::kAnyRank, got, {.tag = 7});
    isend(world[0], 0, sent, {.tag = 7})->wait(kLong);
    recv->wait(kLong);
    EXPECT_EQ(recv->source(), 0);
    EXPECT_EQ(sent, got);
    // Waits for a thread that comes later.
    std::thread later([&] { isend(world[0], 0, sent, {.tag = 8})->wait(kLong); });
    irecv(world[0], 0, got, {.tag = 8})->wait(kLong);
    later.join();
    Bytes other(3);
    const auto odd = isend(world[0], 0, other);
    EXPECT_THROW(irecv(world[0], 0, got)->wait(kLong), MismatchError);
    EXPECT_THROW(odd->wait(kLong), MismatchError);
    EXPECT_THROW(isend(world[0], size, sent), UsageError);
    EXPECT_THROW(irecv(world[0], -2, sent), UsageError);
  }
}

TEST(Messages, AMismatchIsToldToBothSidesAlways) {
  World world(2);
  struct Case {
    size_t sent, received;
    uint64_t kind;
  };
  uint64_t number = 0;
  for (const Case& one : {Case{8, 4, 1}, Case{4, 8, 1}, Case{8, 8, 2}, Case{100'000, 8, 1},
                          Case{8, 100'000, 1}, Case{100'000, 100'000, 2}, Case{0, 1, 1}}) {
    for (const bool send_first : {true, false}) {
      Bytes out(one.sent);
      Bytes in(one.received);
      MessagePtr send;
      if (send_first) send = isend(world[0], 1, out, {.tag = 5});
      const auto recv =
          irecv(world[1], send_first ? 0 : Messages::kAnyRank, in, {.tag = 5, .kind = one.kind});
      if (!send_first) send = isend(world[0], 1, out, {.tag = 5});
      const std::string expected =
          "rank 0 sent " + std::to_string(one.sent) + " bytes of kind 1 as message " +
          std::to_string(++number) + " with tag 5, but rank 1 received " +
          std::to_string(one.received) + " bytes of kind " + std::to_string(one.kind);
      for (const auto& message : {send, recv}) {
        try {
          message->wait(kLong);
          ADD_FAILURE() << "no error: " << expected;
        } catch (const MismatchError& error) {
          EXPECT_EQ(error.what(), expected);
        }
      }
    }
  }
  Bytes out = pattern(10, 1);
  Bytes in(10);
  const auto send = isend(world[0], 1, out, {.tag = 5});
  irecv(world[1], 0, in, {.tag = 5})->wait(kLong);
  send->wait(kLong);
  EXPECT_EQ(in, out);
}

TEST(Messages, AFloodHoldsUpNoOtherTag) {
  World world(2);
  constexpr int kFlood = 5000;
  std::vector<Bytes> buffers;
  std::vector<MessagePtr> sends;
  for (int i = 0; i < kFlood; ++i) buffers.push_back(pattern(2000, static_cast<uint64_t>(i)));
  for (auto& buffer : buffers) sends.push_back(isend(world[0], 1, buffer, {.tag = 1}));
  constexpr int kTags = 5;
  std::vector<Bytes> others;
  for (int i = 0; i < kTags; ++i) others.push_back(pattern(50'000, static_cast<uint64_t>(i)));
  for (int i = 0; i < kTags; ++i)
    sends.push_back(isend(world[0], 1, others[static_cast<size_t>(i)], {.tag = 2 + i}));
  for (int i = kTags - 1; i >= 0; --i) {
    Bytes got(50'000);
    irecv(world[1], 0, got, {.tag = 2 + i})->wait(kLong);
    EXPECT_EQ(got, others[static_cast<size_t>(i)]);
  }
  for (int i = 0; i < kFlood; ++i) {
    Bytes got(2000);
    irecv(world[1], 0, got, {.tag = 1})->wait(kLong);
    ASSERT_EQ(got, buffers[static_cast<size_t>(i)]) << i;
  }
  for (const auto& send : sends) send->wait(kLong);
  EXPECT_EQ(MessagesProbe{world[1]}.unreceived(), 0U);
}

TEST(Messages, GoOnWhileNobodyWaits) {
  World world(2);
  for (const size_t size : {size_t{8}, size_t{8} << 20}) {
    Bytes out = pattern(size, 5);
    Bytes in(size);
    std::atomic<int> calls{0};
    const auto send = isend(world[0], 1, out, {.then = [&] { calls += 1; }});
    const auto recv = irecv(world[1], 0, in, {.then = [&] { calls += 10; }});
    EXPECT_TRUE(comes_true([&] { return calls == 11; }));
    EXPECT_TRUE(send->done() && recv->done());
    EXPECT_EQ(in, out);
  }
}

std::string error_text(const MessagePtr& message) {
  try {
    message->wait(kLong);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

TEST(Messages, TimeOutsNameThePeer) {
  World world(3);
  Bytes small(8);
  Bytes large(1 << 20);
  for (Bytes* bytes : {&small, &large}) {
    const auto send = isend(world[0], 1, *bytes);
    EXPECT_THROW(send->wait(milliseconds(30)), TimeoutError);
    EXPECT_THAT(error_text(send),
                ::testing::MatchesRegex("rank 0: send\\(to rank 1\\) of .* within 0.03 s: rank 1 "
                                        "\\(process .*did not call the receive.*\n.*"));
    EXPECT_EQ(failure_in(send->error()).waited_ms, 30);
    EXPECT_TRUE(tells(failure_in(send->error()), Failure::Kind::late, 1));
  }
  const auto recv = irecv(world[0], 2, small);
  EXPECT_THROW(recv->wait(milliseconds(30)), TimeoutError);
  EXPECT_TRUE(tells(failure_in(recv->error()), Failure::Kind::late, 2));
  const auto any = irecv(world[0], -1, small);
  EXPECT_THROW(any->wait(milliseconds(30)), TimeoutError);
  EXPECT_TRUE(failure_in(any->error()).ranks.empty());
  // Also when nobody waits.
  const auto alone = irecv(world[0], 2, small, {.timeout = milliseconds(30)});
  EXPECT_TRUE(comes_true([&] { return alone->done(); }));
  EXPECT_THROW(alone->wait(kLong), TimeoutError);
  // What comes late does no harm: the receive that follows gets it, or learns what became of it.
  const auto late = isend(world[2], 0, small);
  irecv(world[0], 2, small)->wait(kLong);
  late->wait(kLong);
  irecv(world[1], 0, small)->wait(kLong);
  EXPECT_THROW(irecv(world[1], 0, large)->wait(kLong), PeerLostError);
}

TEST(Messages, APeerThatLeavesFailsThoseThatWaitForIt) {
  World world(3);
  Bytes large(1 << 20);
  Bytes in(8);
  const auto send = isend(world[0], 2, large);
  const auto recv = irecv(world[0], 2, in);
  Bytes other_in(8);
  const auto other = irecv(world[0], 1, other_in);
  Bytes any_in(8);
  const auto any = irecv(world[0], Messages::kAnyRank, any_in, {.tag = 9});
  world.leave(2);
  const auto left = Clock::now();
  EXPECT_THROW(send->wait(kLong), PeerLostError);
  EXPECT_THROW(recv->wait(kLong), PeerLostError);
  EXPECT_LT(Clock::now() - left, std::chrono::seconds(5));
  EXPECT_THAT(error_text(recv), HasSubstr("rank 0: recv(from rank 2) of 8 bytes"));
  EXPECT_TRUE(tells(failure_in(recv->error()), Failure::Kind::closed, 2));
  EXPECT_THROW(isend(world[0], 2, large)->wait(kLong), PeerLostError);
  EXPECT_THROW(irecv(world[0], 2, in)->wait(kLong), PeerLostError);
  EXPECT_FALSE(other->done());
  EXPECT_FALSE(any->done());
  Bytes out = pattern(8, 1);
  isend(world[1], 0, out)->wait(kLong);
  other->wait(kLong);
  EXPECT_EQ(other_in, out);
  world.leave(1);
  EXPECT_THROW(any->wait(kLong), PeerLostError);
  EXPECT_TRUE(tells(failure_in(any->error()), Failure::Kind::closed, 1));
  EXPECT_THROW(irecv(world[0], Messages::kAnyRank, in)->wait(kLong), PeerLostError);
}

TEST(Messages, WhoLeavesOverTheLossOfAnotherSaysSo) {
  World world(3);
  Bytes first(9), second(9);
  const auto from_lost = irecv(world[0], 2, first);
  const auto from_leaver = irecv(world[1], 0, second);
  world.leave(2);
  EXPECT_THROW(from_lost->wait(kLong), PeerLostError);
  world.leave(0);
  EXPECT_THROW(from_leaver->wait(kLong), PeerLostError);
  const Failure failure = failure_in(from_leaver->error());
  ASSERT_EQ(failure.ranks.size(), 1U);
  EXPECT_EQ(failure.ranks[0].number, 0);
  ASSERT_TRUE(failure.cause);
  EXPECT_TRUE(tells(*failure.cause, Failure::Kind::closed, 2));
}

TEST(Messages, WhatWasSentIsReceivedAfterTheSenderHasLeft) {
  World world(2);
  Bytes first = pattern(8, 1);
  Bytes second = pattern(4000, 2);
  Bytes large(100'000);
  for (Bytes* bytes : {&first, &second}) isend(world[0], 1, *bytes);
  isend(world[0], 1, large, {.tag = 1});
  Bytes odd(3);
  isend(world[0], 1, odd, {.tag = 2});
  world.leave(0);
  Bytes got(8);
  irecv(world[1], 0, got)->wait(kLong);
  EXPECT_EQ(got, first);
  got.resize(4000);
  irecv(world[1], Messages::kAnyRank, got)->wait(kLong);
  EXPECT_EQ(got, second);
  EXPECT_THROW(irecv(world[1], 0, large, {.tag = 1})->wait(kLong), PeerLostError);
  EXPECT_THROW(irecv(world[1], 0, got, {.tag = 2})->wait(kLong), MismatchError);
  EXPECT_THROW(irecv(world[1], 0, got)->wait(kLong), PeerLostError);
}

TEST(Messages, TheGroupsFailureFailsAll) {
  World world(3);
  Bytes bytes(8);
  const auto recv = irecv(world[0], 1, bytes);
  world.group(2).fail({.kind = Failure::Kind::ended, .ranks = {{7, Failure::Kind::ended}}});
  EXPECT_THROW(recv->wait(kLong), PeerLostError);
  EXPECT_TRUE(tells(failure_in(recv->error()), Failure::Kind::ended, 7));
  EXPECT_THROW(isend(world[1], 0, bytes)->wait(kLong), PeerLostError);
}

TEST(Messages, CloseFailsWhatIsUnderWay) {
  World world(2);
  Bytes large(1 << 20);
  Bytes in(8);
  const auto send = isend(world[0], 1, large);
  std::atomic<bool> called{false};
  const auto recv = irecv(world[0], 1, in, {.then = [&] { called = true; }});
  std::thread waiter([&] { EXPECT_THROW(recv->wait(kLong), CommError); });
  const auto begin = Clock::now();
  world[0].close();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  EXPECT_TRUE(called);
  waiter.join();
  EXPECT_THROW(send->wait(kLong), CommError);
  EXPECT_THROW(isend(world[0], 1, in)->wait(kLong), CommError);
  EXPECT_THROW(irecv(world[0], 1, in)->wait(kLong), CommError);
  world[0].close();
}

TEST(Messages, AWaitKeepsNoCoreBusy) {
  World world(2);
  Bytes in(8);
  const auto recv = irecv(world[0], 1, in);
  const auto cpu = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  const auto before = cpu();
  EXPECT_THROW(recv->wait(milliseconds(400)), TimeoutError);
  EXPECT_LT(cpu() - before, milliseconds(200));
}

TEST(Messages, ManyThreadsOfOneRank) {
  World world(2);
  constexpr int kThreads = 4;
  constexpr int kRounds = 100;
  expect_ok(run_ranks(2 * kThreads, [&](int index) {
    const int rank = index % 2;
    const int tag = index / 2;
    for (int round = 0; round < kRounds; ++round) {
      const size_t size = round % 10 == 0 ? 100'000 : 10;
      Bytes out = pattern(size, static_cast<uint64_t>(1000 * tag + round));
      Bytes in(size);
      const auto recv = irecv(world[rank], 1 - rank, in, {.tag = tag});
      const auto send = isend(world[rank], 1 - rank, out, {.tag = tag});
      recv->wait(kLong);
      send->wait(kLong);
      EXPECT_EQ(in, out);
    }
  }));
}

/// Exchanges messages of all sizes with the other of two ranks until one fails.
[[noreturn]] void exchange_for_ever(Messages& messages, int other) {
  const std::vector<size_t> sizes = sizes_of(messages);
  for (size_t i = 0;; ++i) {
    const size_t size = sizes[i % sizes.size()];
    Bytes out = pattern(size, i);
    Bytes in(size);
    const auto recv = irecv(messages, other, in);
    const auto send = isend(messages, other, out);
    recv->wait(kLong);
    if (in != out) throw DataError("wrong data in round " + std::to_string(i));
    send->wait(kLong);
  }
}

/// Rank 0 lives here, rank 1 in a child that is killed.
void outlive_a_killed_peer(std::chrono::microseconds after) {
  std::array<int, 2> pipe_ends{};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  SharedGroupOptions options;
  options.rank = child == 0 ? 1 : 0;
  options.size = 2;
  options.message_bytes = 4096;
  if (child == 0) {
    try {
      SharedGroup group(options, meeting_over(pipe_ends));
      Messages messages(group, judge_plainly);
      exchange_for_ever(messages, 0);
    } catch (...) {
      _exit(1);
    }
  }
  SharedGroup group(options, meeting_over(pipe_ends));
  Messages messages(group, judge_plainly);
  Clock::time_point killed;
  std::thread killer([&] {
    const auto end = Clock::now() + after;
    while (Clock::now() < end) std::this_thread::yield();
    killed = Clock::now();
    kill(child, SIGKILL);
  });
  Failure failure;
  try {
    exchange_for_ever(messages, 1);
  } catch (const PeerLostError& error) {
    failure = error.failure();
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  const auto noticed = Clock::now();
  killer.join();
  // Far below the time-out. How long it takes on a quiet machine is for the fault tests to print.
  EXPECT_LT(noticed - killed, std::chrono::seconds(10));
  ASSERT_EQ(failure.ranks.size(), 1U);
  EXPECT_TRUE(tells(failure, Failure::Kind::ended, 1));
  EXPECT_EQ(failure.ranks[0].process, child);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  for (const int end : pipe_ends) close(end);
}

TEST(Messages, AKilledPeerIsNamedInTime) {
  const uint64_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20 && !HasFailure(); ++round)
    outlive_a_killed_peer(std::chrono::microseconds(random() % 20'000));
}

/// All messages of a round are known to all ranks; each posts its part in an order of its own that
/// keeps the order within a channel, waits for some in between where that cannot block for ever
/// (all is posted by then), and then for all.
struct Parcel {
  int from, to, tag;
  size_t size;
  uint64_t seed;
};

std::vector<Parcel> draw_parcels(std::mt19937_64& random, int ranks, Messages& messages) {
  const std::vector<size_t> sizes = sizes_of(messages);
  std::vector<Parcel> parcels(20 + random() % 180);
  for (auto& parcel : parcels) {
    const auto rank = [&] { return static_cast<int>(random() % static_cast<uint64_t>(ranks)); };
    parcel = {rank(), rank(), static_cast<int>(random() % 4), sizes[random() % sizes.size()],
              random()};
    if (random() % 2) parcel.size = random() % 64;
  }
  return parcels;
}

void move_parcels(Messages& messages, int rank, const std::vector<Parcel>& parcels, uint64_t seed) {
  std::mt19937_64 random(seed);
  struct Post {
    const Parcel* parcel;
    bool send;
    Bytes bytes;
    MessagePtr message;
  };
  // A random interleaving of the channels' posts.
  std::vector<std::vector<Post>> channels;
  for (const bool send : {true, false}) {
    for (int peer = 0; peer < MessagesProbe{messages}.size(); ++peer) {
      for (int tag = 0; tag < 4; ++tag) {
        std::vector<Post> channel;
        for (const Parcel& parcel : parcels) {
          const bool mine = send ? parcel.from == rank && parcel.to == peer
                                 : parcel.to == rank && parcel.from == peer;
          if (mine && parcel.tag == tag)
            channel.push_back(
                {&parcel, send, send ? pattern(parcel.size, parcel.seed) : Bytes(parcel.size), {}});
        }
        if (!channel.empty()) channels.push_back(std::move(channel));
      }
    }
  }
  std::vector<size_t> next(channels.size(), 0);
  std::vector<Post*> posted;
  while (true) {
    std::vector<size_t> left;
    for (size_t i = 0; i < channels.size(); ++i)
      if (next[i] < channels[i].size()) left.push_back(i);
    if (left.empty()) break;
    const size_t chosen = left[random() % left.size()];
    Post& post = channels[chosen][next[chosen]++];
    const Parcel& parcel = *post.parcel;
    post.message = post.send ? isend(messages, parcel.to, post.bytes, {.tag = parcel.tag})
                             : irecv(messages, parcel.from, post.bytes, {.tag = parcel.tag});
    posted.push_back(&post);
    if (random() % 16 == 0) std::this_thread::yield();
  }
  std::shuffle(posted.begin(), posted.end(), random);
  for (Post* post : posted) {
    post->message->wait(kLong);
    ASSERT_EQ(post->bytes, pattern(post->parcel->size, post->parcel->seed));
  }
}

class MessagesTraffic : public ::testing::TestWithParam<int> {};

TEST_P(MessagesTraffic, Random) {
  const int ranks = GetParam();
  const uint64_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 random(seed);
  for (int round = 0; round < 10; ++round) {
    World world(ranks, random() % 2 ? 4096 : 64 << 10);
    for (int again = 0; again < 3; ++again) {
      const std::vector<Parcel> parcels = draw_parcels(random, ranks, world[0]);
      const uint64_t order = random();
      expect_ok(run_ranks(ranks, [&](int rank) {
        move_parcels(world[rank], rank, parcels, order + static_cast<uint64_t>(rank));
      }));
    }
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(MessagesProbe{world[rank]}.unreceived(), 0U);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, MessagesTraffic, ::testing::Values(2, 3, 4, 7),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace messages_test
}  // namespace lockstep::shm
