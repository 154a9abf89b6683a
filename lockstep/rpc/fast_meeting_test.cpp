// How the ranks of a job get their link, in real processes.
#include "lockstep/rpc/fast_meeting.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "lockstep/base/text.h"
#include "lockstep/comm/world.h"
#include "lockstep/launch/spawn.h"
#include "tests/support/file_limit.h"

namespace lockstep::rpc::detail {
namespace fast_meeting_test {

using namespace std::chrono_literals;

// It has said that it can share memory, and then has no descriptor left for it.
TEST(FastMeeting, ARankThatFailsLateHoldsNobodyUp) {
  spawn(
      [](int rank) {
        const World world = init(InitOptions{});
        Store store = prefix_store("meeting", world.store().clone());
        store.set_timeout(60s);
        const auto begin = std::chrono::steady_clock::now();
        if (rank == 1) {
          Store other = store.clone();
          std::thread meets([&] { EXPECT_EQ(meet(store, {.rank = 1, .size = 3}), nullptr); });
          other.wait({numbered_keys("fast/wish/", 3)[1]});
          const lockstep::test::FileLimit none(0);
          other.set("is_poor", "");
          meets.join();
        } else {
          store.get("is_poor");
          EXPECT_EQ(meet(store, {.rank = rank, .size = 3}), nullptr);
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begin, 40s) << "it waited for the time-out";
        if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed");
      },
      3);
}

}  // namespace fast_meeting_test
}  // namespace lockstep::rpc::detail
