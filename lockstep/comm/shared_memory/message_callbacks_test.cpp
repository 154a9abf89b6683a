// What is called when a message ends, by whom, and what it may do.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/messages.h"
#include "tests/support/messages_world.h"

namespace lockstep::shm {
namespace message_callbacks_test {

using namespace messages_world;

TEST(MessageCallbacks, AWaitReturnsAfterTheCallback) {
  World world(2);
  for (int i = 0; i < 200; ++i) {
    Bytes out(8);
    Bytes in(8);
    std::atomic<bool> called{false};
    const auto recv = irecv(world[1], 0, in);
    recv->then([&] {
      called = true;
      return false;
    });
    const auto send = isend(world[0], 1, out);
    recv->wait(kLong);
    EXPECT_TRUE(called);
    send->wait(kLong);
  }
}

/// Keeps the thread of a rank's Messages at a callback until its end.
class Busy {
 public:
  Busy(World& world, int rank) : recv_(irecv(world[rank], 1 - rank, in_, {.tag = 2000})) {
    recv_->then([this] {
      is_busy_ = true;
      EXPECT_TRUE(comes_true([this] { return over_.load(); }));
      return false;
    });
    isend(world[1 - rank], rank, in_, {.tag = 2000})->wait(kLong);
    EXPECT_TRUE(comes_true([this] { return is_busy_.load(); }));
  }
  void end() { over_ = true; }
  ~Busy() { end(); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Bytes in_ = Bytes(0);
  std::atomic<bool> is_busy_{false}, over_{false};
  MessagePtr recv_;
};

// Its answer found no room in the ring, and nothing else is under way here.
TEST(MessageCallbacks, AnAnswerIsSentAlsoWhenItsReceiveIsDoneAtOnce) {
  constexpr int kSends = 60;
  World world(2, {}, 8192);
  Bytes none(0), large(3 * world[0].chunk_bytes()), into(large.size());
  // The announcements have come: rank 0 was busy with a receive.
  std::vector<MessagePtr> sends;
  const auto wakes = irecv(world[0], 1, none, {.tag = 1000});
  for (int i = 0; i < kSends; ++i) sends.push_back(isend(world[1], 0, none, {.tag = i}));
  EXPECT_TRUE(comes_true([&] { return world[0].unreceived() == kSends; }));
  isend(world[1], 0, none, {.tag = 1000})->wait(kLong);
  wakes->wait(kLong);
  Busy busy(world, 1);
  const auto sent = isend(world[0], 1, large, {.tag = 3000});
  const auto received = irecv(world[1], 0, into, {.tag = 3000});
  sent->wait(kLong);
  EXPECT_TRUE(comes_true([&] { return world[0].parked(); }));
  for (int i = 0; i < kSends; ++i) {
    const auto recv = irecv(world[0], 1, none, {.tag = i});
    EXPECT_TRUE(recv->done());
  }
  busy.end();
  received->wait(kLong);
  for (const auto& send : sends) EXPECT_TRUE(comes_true([&] { return send->done(); }));
}

/// A receive of rank 1, whose callbacks run `then`, and whether they have ended.
struct Answered {
  Bytes in = Bytes(8);
  MessagePtr recv;
  std::atomic<bool> over{false};
  void begin(World& world, int tag, const std::function<void()>& then) {
    recv = irecv(world[1], 0, in, {.tag = tag});
    recv->then([] { return true; },
               [this, then] {
                 then();
                 over = true;
               });
  }
};

// Neither the thread that waits nor that of Messages is free while it runs callbacks.
TEST(MessageCallbacks, CallbacksMayWaitForOtherMessages) {
  for (const bool waits : {true, false}) {
    World world(2);
    Bytes out(8);
    Bytes later(8);
    Answered first;
    const auto second = irecv(world[1], 0, later, {.tag = 2});
    first.begin(world, 1, [&] { second->wait(kLong); });
    const auto send = isend(world[0], 1, out, {.tag = 1});
    std::thread sends([&] {
      // The second comes when the callback waits, or shortly before.
      EXPECT_TRUE(comes_true([&] { return first.recv->done(); }));
      isend(world[0], 1, out, {.tag = 2})->wait(kLong);
    });
    if (waits) first.recv->wait(kLong);
    EXPECT_TRUE(comes_true([&] { return first.over.load(); })) << waits;
    sends.join();
    send->wait(kLong);
  }
}

// As of a future that the callback waits for: its thread does nothing for the message meanwhile.
TEST(MessageCallbacks, CallbacksMayWaitForCallbacksOfOthers) {
  for (const bool waits : {true, false}) {
    World world(2);
    Bytes out(8);
    std::vector<Answered> chain(6);
    for (size_t i = 0; i < chain.size(); ++i) {
      chain[i].begin(world, static_cast<int>(i), [&, i] {
        const auto next = [&] { return i + 1 == chain.size() || chain[i + 1].over; };
        EXPECT_TRUE(comes_true(next)) << i;
      });
    }
    // The later ones last: each callback runs already when the next message comes.
    std::vector<MessagePtr> sends;
    for (size_t i = 0; i < chain.size(); ++i) {
      sends.push_back(isend(world[0], 1, out, {.tag = static_cast<int>(i)}));
      if (!waits) {
        EXPECT_TRUE(comes_true([&] { return chain[i].recv->done(); }));
      }
    }
    if (waits) chain[0].recv->wait(kLong);
    for (const auto& one : chain) EXPECT_TRUE(comes_true([&] { return one.over.load(); }));
    for (const auto& send : sends) send->wait(kLong);
  }
}

TEST(MessageCallbacks, AThreadThatWaitsRunsNoCallbacksOfOtherMessages) {
  World world(2);
  Bytes out(8);
  Bytes in(8);
  Answered other;
  std::atomic<bool> may_end{false};
  std::thread::id ran_in;
  other.begin(world, 1, [&] {
    ran_in = std::this_thread::get_id();
    EXPECT_TRUE(comes_true([&] { return may_end.load(); }));
  });
  const auto recv = irecv(world[1], 0, in, {.tag = 2});
  const auto first = isend(world[0], 1, out, {.tag = 1});
  const auto second = isend(world[0], 1, out, {.tag = 2});
  recv->wait(kLong);
  may_end = true;
  EXPECT_TRUE(comes_true([&] { return other.over.load(); }));
  EXPECT_NE(ran_in, std::this_thread::get_id());
  first->wait(kLong);
  second->wait(kLong);
}

TEST(MessageCallbacks, CloseLetsCallbacksEnd) {
  World world(2);
  std::vector<Answered> all(3);
  for (size_t i = 0; i < all.size(); ++i) {
    // What it waits for fails as well.
    all[i].begin(world, static_cast<int>(i), [&, i] {
      if (i > 0) {
        EXPECT_THROW(all[i - 1].recv->wait(kLong), CommError);
      }
    });
  }
  world[1].close();
  for (const auto& one : all) EXPECT_TRUE(one.over);
}

}  // namespace message_callbacks_test
}  // namespace lockstep::shm
