// A fork without exec, as the workers of a data loader are: the groups stay its parent's.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>

#include "lockstep/base/error.h"
#include "lockstep/comm/process_group.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"
#include "tests/support/page_faults.h"

namespace lockstep {
namespace fork_test {

constexpr int kLongest = 20;  // Seconds.

/// What `body` returns in a fork; -1 where it does not end.
template <class Body>
int in_fork(Body body) {
  return test::in_another_process([&] {
    ::alarm(kLongest);
    return body();
  });
}

using test::is_plain_comm_error;

class Fork : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Fork, test::over_backends(), test::backend_name);

TEST_P(Fork, LeavesTheGroupToItsParent) {
  for (const auto debug : {DebugLevel::off, DebugLevel::info, DebugLevel::detail}) {
    run_group(
        2,
        [](ProcessGroup group) {
          at::Tensor data = at::ones({100'000});
          group.all_reduce_async(data).wait();  // The backend has its threads now.
          const int peer = 1 - group.rank();
          at::Tensor message = at::ones({10});
          group.rank() == 0 ? group.send(message, peer) : group.recv(message, peer);
          if (group.rank() == 0) {
            const auto calls = [&] {
              at::Tensor more = at::ones({10});
              if (!is_plain_comm_error([&] { group.all_reduce(more); })) return 1;
              if (!is_plain_comm_error([&] { group.all_reduce_async(more).wait(); })) return 2;
              if (!is_plain_comm_error([&] { group.send(more, 1); })) return 3;
              if (!is_plain_comm_error([&] { group.irecv(more, 1).wait(); })) return 4;
              if (!is_plain_comm_error([&] { group.barrier(); })) return 5;
              if (!is_plain_comm_error([&] { group.monitored_barrier(std::chrono::seconds(5)); }))
                return 6;
              if (!is_plain_comm_error([&] { (void)group.symmetric_empty(10, at::kFloat); }))
                return 7;
              if (!is_plain_comm_error([&] { (void)common_empty(group, 10, at::kFloat); }))
                return 8;
              return 0;
            };
            EXPECT_EQ(in_fork(calls), 0);
          }
          at::Tensor after = at::ones({4});
          group.all_reduce(after);
          EXPECT_EQ(after[3].item<float>(), 2);
        },
        {.debug = debug});
  }
}

}  // namespace fork_test
}  // namespace lockstep
