#include "lockstep/comm/backends/call_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>

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
bool both_submit(bool async) {
  std::atomic<int> running{0};
  std::atomic<bool> first_may_end{false}, second_submits{false};
  CallQueue queue({[](TensorWork&, bool) { return false; },
                   [&](TensorWork&) {
                     if (running++ == 0)
                       wait_until([&] { return first_may_end.load(); }, "the end");
                   }});
  const auto first = work_of(async), second = work_of(async);
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
