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
    const auto recv = irecv(world[1], 0, in, {.then = [&] { called = true; }});
    const auto send = isend(world[0], 1, out);
    recv->wait(kLong);
    EXPECT_TRUE(called);
    send->wait(kLong);
  }
}

/// Keeps the thread of a rank's Messages at a callback until its end.
class Busy {
 public:
  Busy(World& world, int rank) {
    irecv(world[rank], 1 - rank, in_, {.tag = 2000, .then = [this] {
                                         is_busy_ = true;
                                         EXPECT_TRUE(comes_true([this] { return over_.load(); }));
                                       }});
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
};

// Its answer found no room in the ring, and nothing else is under way here.
TEST(MessageCallbacks, AnAnswerIsSentAlsoWhenItsReceiveIsDoneAtOnce) {
  constexpr int kSends = 60;
  World world(2, 8192);
  Bytes none(0), large(3 * MessagesProbe{world[0]}.chunk_bytes()), into(large.size());
  // The announcements have come: rank 0 was busy with a receive.
  std::vector<MessagePtr> sends;
  const auto wakes = irecv(world[0], 1, none, {.tag = 1000});
  for (int i = 0; i < kSends; ++i) sends.push_back(isend(world[1], 0, none, {.tag = i}));
  EXPECT_TRUE(comes_true([&] { return MessagesProbe{world[0]}.unreceived() == kSends; }));
  isend(world[1], 0, none, {.tag = 1000})->wait(kLong);
  wakes->wait(kLong);
  Busy busy(world, 1);
  const auto sent = isend(world[0], 1, large, {.tag = 3000});
  const auto received = irecv(world[1], 0, into, {.tag = 3000});
  sent->wait(kLong);
  EXPECT_TRUE(comes_true([&] { return MessagesProbe{world[0]}.parked(); }));
  for (int i = 0; i < kSends; ++i) {
    const auto recv = irecv(world[0], 1, none, {.tag = i});
    EXPECT_TRUE(recv->done());
  }
  busy.end();
  received->wait(kLong);
  for (const auto& send : sends) EXPECT_TRUE(comes_true([&] { return send->done(); }));
}

}  // namespace message_callbacks_test
}  // namespace lockstep::shm
