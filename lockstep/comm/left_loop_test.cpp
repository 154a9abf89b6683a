// Ranks whose training loops are not of the same length: who goes on is told so, and by whom.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace left_loop_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// What a rank that calls once more is told.
template <class Expected>
std::string told(const ProcessGroup& group) {
  return test::message_of<Expected>([&] {
    at::Tensor sum = at::ones({3});
    group.all_reduce(sum);
  });
}

void make_steps(const ProcessGroup& group, int steps) {
  for (int step = 1; step <= steps; ++step) {
    at::Tensor sum = at::ones({3});
    group.all_reduce(sum);
    group.note_steps(step);
  }
}

class LeftLoop : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, LeftLoop, test::over_backends(), test::backend_name);

TEST_P(LeftLoop, TellsWhoLeftAndAfterHowManySteps) {
  // Within the calls that Gloo's ranks compare, and after them.
  for (const int steps : {1, 3, 14}) {
    for (const int size : {2, 3}) {
      run_group(size, [&](ProcessGroup group) {
        make_steps(group, steps);
        if (group.rank() == size - 1) return;
        const std::string leaver = "rank " + std::to_string(size - 1);
        const std::string after = steps == 1 ? "1 step" : std::to_string(steps) + " steps";
        const std::string text = told<PeerLeftError>(group);
        EXPECT_THAT(text, AllOf(HasSubstr(leaver), HasSubstr(" left its loop after " + after),
                                HasSubstr("hint: all ranks must make the same number of steps: "
                                          "all-reduce the criterion"),
                                Not(HasSubstr("has ended")), Not(HasSubstr(kPeerLostHint))));
      });
    }
  }
}

TEST_P(LeftLoop, TheMostStepsSaidCount) {
  run_group(2, [&](ProcessGroup group) {
    make_steps(group, 12);
    group.note_steps(7);  // Of a second model, say.
    if (group.rank() == 1) return;
    EXPECT_THAT(told<PeerLeftError>(group), HasSubstr("left its loop after 12 steps"));
  });
}

TEST_P(LeftLoop, WithoutStepsARankIsLost) {
  run_group(2, [&](ProcessGroup group) {
    make_steps(group, 0);
    at::Tensor sum = at::ones({3});
    group.all_reduce(sum);
    if (group.rank() == 1) return;
    const std::string text = told<PeerLostError>(group);
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1"), Not(HasSubstr("left its loop"))));
  });
}

/// The leader of its host, or that of another one, is in no call, and so does not miss it.
TEST(LeftLoopOfAnotherHost, IsToldWhileALeaderWaitsForAMessage) {
  for (const int waits : {0, 1}) {
    test::run_group(4,
                    [&](ProcessGroup group) {
                      make_steps(group, 12);
                      if (group.rank() == 3) return;
                      if (group.rank() == waits) {
                        at::Tensor message = at::ones({3});
                        EXPECT_THROW(group.recv_any(message), PeerLostError);
                      } else {
                        EXPECT_THAT(told<PeerLeftError>(group),
                                    HasSubstr("left its loop after 12 steps"));
                      }
                    },
                    {.backend = "hierarchical", .hosts = "abab"});
  }
}

/// Its own failure is the cause, not that it left then.
TEST_P(LeftLoop, ARankThatHasFailedDoesNotCountAsOneThatLeft) {
  run_group(3, [&](ProcessGroup group) {
    make_steps(group, 12);
    if (group.rank() == 2) return;
    EXPECT_THAT(told<PeerLeftError>(group), HasSubstr("rank 2"));
    // Rank 1 closes its group now, normally. Rank 0 calls again.
    if (group.rank() == 1) return;
    EXPECT_THAT(told<CommError>(group), Not(HasSubstr("rank 1 left its loop")));
  });
}

}  // namespace left_loop_test
}  // namespace lockstep
