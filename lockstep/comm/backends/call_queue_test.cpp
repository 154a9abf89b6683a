#include "lockstep/comm/backends/call_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "tests/support/test_wait.h"

namespace lockstep::backends {
namespace call_queue_test {

using test_wait::wait_until;

struct Work final : TensorWork {
  Work(bool async, std::function<void()> run)
      : TensorWork(0, {.async = async}, std::make_shared<GroupNames>()), run_(std::move(run)) {}
  void run_later() override { run_(); }
  const std::function<void()> run_;
};

/// Two threads submit; the second while the first's call runs. True when both have returned.
bool both_submit(bool async) {
  std::atomic<int> running{0};
  std::atomic<bool> first_may_end{false}, second_submits{false};
  CallQueue queue;
  const auto run = [&] {
    if (running++ == 0) wait_until([&] { return first_may_end.load(); }, "the end");
  };
  const auto first = c10::make_intrusive<Work>(async, run),
             second = c10::make_intrusive<Work>(async, run);
  std::thread one([&] { queue.submit(first); });
  std::thread other([&] {
    wait_until([&] { return running > 0; }, "the first call");
    second_submits = true;
    queue.submit(second);
  });
  wait_until([&] { return second_submits.load(); }, "the second call");
  first_may_end = true;
  wait_until([&] { return first->isCompleted() && second->isCompleted(); }, "both");
  one.join();
  other.join();
  return running == 2;
}

TEST(CallQueue, TwoThreadsMaySubmit) {
  for (const bool async : {false, true}) EXPECT_TRUE(both_submit(async));
}

}  // namespace call_queue_test
}  // namespace lockstep::backends
