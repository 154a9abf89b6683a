#include "lockstep/comm/shared_memory/message_ring.h"

#include <gtest/gtest.h>

#include <cstring>
#include <iostream>
#include <random>
#include <thread>
#include <vector>

#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::shm {
namespace message_ring_test {

struct alignas(64) Memory {
  std::array<std::byte, 4096> bytes{};
};

Frame frame_of(size_t bytes, uint64_t id) {
  Frame frame{};
  frame.kind = id % 3 == 0 ? FrameKind::data : FrameKind::announce;
  frame.bytes = static_cast<uint32_t>(bytes);
  frame.id = id;
  return frame;
}

TEST(MessageRing, NothingIsThereBeforeItIsPublished) {
  Memory memory;
  RingWriter writer;
  RingReader reader;
  writer.attach(memory.bytes.data(), memory.bytes.size());
  reader.attach(memory.bytes.data(), memory.bytes.size());
  EXPECT_FALSE(writer.publish());
  std::byte* place = writer.put(frame_of(5, 1));
  ASSERT_NE(place, nullptr);
  std::memcpy(place, "hello", 5);
  EXPECT_FALSE(reader.filled());
  EXPECT_EQ(reader.next(), nullptr);
  EXPECT_TRUE(writer.publish());
  EXPECT_TRUE(reader.filled());
  const Frame* frame = reader.next();
  ASSERT_NE(frame, nullptr);
  EXPECT_EQ(std::memcmp(reader.payload(*frame), "hello", 5), 0);
  EXPECT_EQ(reader.next(), frame);
  reader.pop(*frame);
  EXPECT_EQ(reader.next(), nullptr);
}

TEST(MessageRing, AFullOneTellsWhenThereIsRoom) {
  Memory memory;
  RingWriter writer;
  RingReader reader;
  writer.attach(memory.bytes.data(), memory.bytes.size());
  reader.attach(memory.bytes.data(), memory.bytes.size());
  size_t frames = 0;
  while (writer.put(frame_of(24, 1))) ++frames;
  EXPECT_EQ(frames, ring_capacity(memory.bytes.size()) / 64);
  writer.publish();
  EXPECT_TRUE(writer.waiting());
  EXPECT_FALSE(writer.moved());
  reader.pop(*reader.next());
  EXPECT_FALSE(writer.moved());
  EXPECT_TRUE(reader.release());
  EXPECT_TRUE(writer.moved());
  EXPECT_NE(writer.put(frame_of(24, 1)), nullptr);
  EXPECT_FALSE(writer.waiting());
  EXPECT_FALSE(writer.moved());
  reader.pop(*reader.next());
  EXPECT_FALSE(reader.release());
}

/// Two threads, all sizes up to the largest, each asleep when there is nothing to do for it: a
/// wake-up that is lost ends the test by its time-out.
TEST(MessageRing, CarriesAllInOrderAndLosesNoWakeUp) {
  Memory memory;
  Mailbox writers{};
  Mailbox readers{};
  const uint64_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  constexpr uint64_t kFrames = 50'000;
  const size_t largest = ring_capacity(memory.bytes.size()) / 2 - 64;
  const auto sleep = [](Mailbox& mailbox, const auto& enough) {
    mailbox.sleepers.fetch_add(1);
    const uint32_t seen = mailbox.doorbell.load();
    if (!enough()) sleep_on(mailbox.doorbell, seen, std::chrono::seconds(30));
    mailbox.sleepers.fetch_sub(1);
  };
  std::thread thread([&] {
    RingWriter writer;
    writer.attach(memory.bytes.data(), memory.bytes.size());
    std::mt19937_64 random(seed);
    for (uint64_t id = 1; id <= kFrames; ++id) {
      const Frame frame = frame_of(random() % (id % 2 ? largest + 1 : 50), id);
      std::byte* place = writer.put(frame);
      while (!place) {
        if (writer.publish()) readers.ring();
        sleep(writers, [&] { return writer.moved(); });
        place = writer.put(frame);
      }
      if (frame.bytes > 0) std::memset(place, static_cast<int>(id & 0xFF), frame.bytes);
      if (random() % 3 && writer.publish()) readers.ring();
    }
    if (writer.publish()) readers.ring();
  });
  RingReader reader;
  reader.attach(memory.bytes.data(), memory.bytes.size());
  std::mt19937_64 random(seed + 1);
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t id = 1; id <= kFrames;) {
    const Frame* frame = reader.next();
    if (!frame || random() % 8 == 0) {
      if (reader.unreleased() > 0 && reader.release()) writers.ring();
    }
    if (!frame) {
      sleep(readers, [&] { return reader.filled(); });
      continue;
    }
    ASSERT_EQ(frame->id, id);
    const std::byte* payload = reader.payload(*frame);
    for (uint32_t i = 0; i < frame->bytes; ++i)
      ASSERT_EQ(std::to_integer<unsigned>(payload[i]), id & 0xFF);
    reader.pop(*frame);
    ++id;
  }
  thread.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(25));
}

}  // namespace message_ring_test
}  // namespace lockstep::shm
