#include "lockstep/rpc/rpc_worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace lockstep::rpc::detail {
namespace call_count_test {

constexpr auto kLong = std::chrono::seconds(30);

TEST(CallCount, ACallBeyondTheLimitWaitsForAnAnswer) {
  CallCount calls(2);
  EXPECT_TRUE(calls.begin(kLong));
  EXPECT_TRUE(calls.begin(kLong));
  EXPECT_FALSE(calls.begin(std::chrono::milliseconds(1)));
  std::atomic<int> most = 0;
  std::thread third([&] {
    EXPECT_TRUE(calls.begin(kLong));
    most = static_cast<int>(calls.pending());
    calls.end();
  });
  EXPECT_TRUE(calls.begin({}));  // A handler's does not wait.
  EXPECT_EQ(calls.pending(), 3);
  calls.end();
  EXPECT_EQ(most, 0);
  calls.end();
  third.join();
  EXPECT_EQ(most, 2);
  EXPECT_EQ(calls.begun(), 4);
}

TEST(CallCount, WaitsForTheLast) {
  CallCount calls(2);
  EXPECT_TRUE(calls.begin(kLong));
  EXPECT_FALSE(calls.wait_for_none(std::chrono::steady_clock::now()));
  std::thread other([&] { calls.end(); });
  EXPECT_TRUE(calls.wait_for_none(std::chrono::steady_clock::now() + kLong));
  other.join();
}

}  // namespace call_count_test
}  // namespace lockstep::rpc::detail
