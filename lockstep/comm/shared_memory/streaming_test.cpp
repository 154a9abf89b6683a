#include "lockstep/comm/shared_memory/streaming.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "lockstep/comm/shared_memory/distance.h"
#include "tests/support/messages_world.h"

namespace lockstep::shm {
namespace {

using std::chrono::nanoseconds;
using testing::Bytes;

TEST(StreamBytes, CopiesAnyLengthFromAndToAnywhere) {
  constexpr size_t kMost = 300;
  const Bytes source = testing::pattern(kMost + 64, 7);
  for (const size_t to : {0, 1, 31, 63}) {
    for (const size_t from : {0, 5, 64}) {
      for (size_t bytes = 0; bytes <= kMost; ++bytes) {
        Bytes target(kMost + 128, 0xEE);
        Bytes expected = target;
        std::copy_n(source.begin() + static_cast<ptrdiff_t>(from), bytes,
                    expected.begin() + static_cast<ptrdiff_t>(to));
        stream_bytes(reinterpret_cast<std::byte*>(target.data()) + to,
                     reinterpret_cast<const std::byte*>(source.data()) + from, bytes);
        end_stream();
        ASSERT_EQ(target, expected) << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

bool far_after(Distance& distance, int looks, nanoseconds each) {
  for (int i = 0; i < looks; ++i) distance.add(each);
  return distance.far();
}

TEST(Distance, IsWhatMostLooksOfLateSay) {
  Distance distance;
  EXPECT_FALSE(distance.far()) << "before the first look";
  EXPECT_FALSE(far_after(distance, 100, nanoseconds(50)));
  EXPECT_FALSE(far_after(distance, 1, std::chrono::seconds(1))) << "one interrupt";
  EXPECT_FALSE(far_after(distance, 20, nanoseconds(40)));
  EXPECT_TRUE(far_after(distance, 20, nanoseconds(140)));
  EXPECT_TRUE(far_after(distance, 1, nanoseconds(-5))) << "one look, and a slow clock";
  EXPECT_FALSE(far_after(distance, 20, nanoseconds(40)));
}

}  // namespace
}  // namespace lockstep::shm
