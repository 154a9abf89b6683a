#include "lockstep/rpc/handler_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>

#include "tests/support/page_faults.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc::detail {
namespace handler_threads_test {

using test_wait::wait_until;

TEST(HandlerThreads, TasksThatWaitForLaterOnesDoNotLockUp) {
  constexpr int kTasks = 40;
  std::latch all(kTasks);
  std::latch done(kTasks);
  HandlerThreads threads(4);
  for (int i = 0; i < kTasks; ++i) {
    threads.run([&] {
      all.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
  // One more may have started where the machine stood still for a moment.
  EXPECT_GE(threads.size(), static_cast<size_t>(kTasks));
}

TEST(HandlerThreads, ManyShortTasksDoNotStartManyThreads) {
  constexpr int kTasks = 2000;
  std::latch done(kTasks);
  HandlerThreads threads(4);
  for (int i = 0; i < kTasks; ++i) threads.run([&] { done.count_down(); });
  done.wait();
  // A few more where the machine stood still for a moment.
  EXPECT_LT(threads.size(), 40U);
}

TEST(HandlerThreads, OneThatWaitsLetsAnotherTakeItsPlace) {
  constexpr int kTasks = 20;
  std::latch all(kTasks), done(kTasks);
  HandlerThreads threads(1);
  for (int i = 0; i < kTasks; ++i) {
    threads.run([&] {
      const HandlerThreads::Waiting waiting;
      all.arrive_and_wait();
      done.count_down();
    });
  }
  done.wait();
}

TEST(HandlerThreads, AFreeThreadIsUsedAgain) {
  HandlerThreads threads(4);
  for (int i = 0; i < 100; ++i) {
    std::latch done(1);
    threads.run([&] { done.count_down(); });
    done.wait();
  }
  EXPECT_LT(threads.size(), 100U);
}

TEST(HandlerThreads, ATaskForLaterRunsWhenItsTimeHasCome) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::milliseconds;
  std::latch all(3);
  std::atomic<int> next = 0;
  int order[3] = {};
  const auto begin = Clock::now();
  {
    HandlerThreads threads(1);
    threads.run_later(std::chrono::hours(1), [] { FAIL() << "its time has not come"; });
    for (const int hundreds : {3, 1, 2}) {
      const milliseconds delay(100 * hundreds);
      threads.run_later(delay, [&, delay, hundreds] {
        EXPECT_GE(Clock::now() - begin, delay);
        order[next++] = hundreds;
        all.count_down();
      });
    }
    all.wait();
  }
  EXPECT_EQ(std::vector<int>(std::begin(order), std::end(order)), (std::vector<int>{1, 2, 3}));
}

TEST(HandlerThreads, ATaskThatDoesNotEndIsLeftBehind) {
  // They live longer than the threads.
  static std::latch begun(2), released(1), over(2);
  {
    HandlerThreads threads(4);
    for (int i = 0; i < 2; ++i) {
      threads.run([] {
        begun.count_down();
        released.wait();
        over.count_down();
      });
    }
    begun.wait();
    EXPECT_FALSE(threads.end(std::chrono::milliseconds(10)));
    threads.run([] { FAIL() << "after the end"; });
    EXPECT_FALSE(threads.end(std::chrono::milliseconds(1)));
    released.count_down();
    over.wait();
    EXPECT_TRUE(threads.end(std::chrono::seconds(30)));
  }
}

TEST(HandlerThreads, TheDestructorWaitsForWhatRuns) {
  std::atomic<bool> ended = false;
  {
    std::latch begun(1);
    HandlerThreads threads(4);
    threads.run([&] {
      begun.count_down();
      std::this_thread::yield();
      ended = true;
    });
    begun.wait();
  }
  EXPECT_TRUE(ended);
}

}  // namespace handler_threads_test
}  // namespace lockstep::rpc::detail
