#include "lockstep/comm/backends/call_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

#include "tests/support/page_faults.h"
#include "tests/support/refuse_threads.h"
#include "tests/support/test_wait.h"

namespace lockstep::backends {
namespace call_queue_test {

using test_wait::wait_until;

c10::intrusive_ptr<TensorWork> work_of(bool async) {
  Request request;
  request.async = async;
  return c10::make_intrusive<TensorWork>(0, request, std::make_shared<GroupNames>());
}

/// Two threads submit; the second while the first's call runs. True when both have returned.
bool both_submit(bool async, bool without_threads) {
  std::atomic<int> running{0};
  std::atomic<bool> refused{!without_threads}, first_may_end{false}, second_submits{false};
  CallQueue queue({[](TensorWork&, bool) { return false; },
                   [&](TensorWork&) {
                     if (running++ == 0)
                       wait_until([&] { return first_may_end.load(); }, "the end");
                   }});
  const auto first = work_of(async), second = work_of(async);
  std::thread one([&] {
    wait_until([&] { return refused.load(); }, "the refusal");
    queue.submit(first);
  });
  std::thread other([&] {
    wait_until([&] { return running > 0; }, "the first call");
    second_submits = true;
    queue.submit(second);
  });
  if (without_threads) test::refuse_threads();
  refused = true;
  wait_until([&] { return second_submits.load(); }, "the second call");
  first_may_end = true;
  wait_until([&] { return first->isCompleted() && second->isCompleted(); }, "both");
  one.join();
  other.join();
  return running == 2;
}

TEST(CallQueue, TwoThreadsMaySubmit) {
  for (const bool async : {false, true}) EXPECT_TRUE(both_submit(async, false));
}

TEST(CallQueue, TwoThreadsMaySubmitWhereNoThreadCanBeStarted) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory goes beyond any limit";
#endif
  for (const bool async : {false, true}) {
    const int failures = test::in_another_process(
        [async] { return both_submit(async, true) && !::testing::Test::HasFailure() ? 0 : 1; });
    EXPECT_EQ(failures, 0) << async;
  }
}

}  // namespace call_queue_test
}  // namespace lockstep::backends
