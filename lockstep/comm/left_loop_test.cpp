// Ranks whose training loops are not of the same length: who goes on is told so, and by whom.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>

#include "lockstep/base/error.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"
#include "tests/support/run_ranks.h"

namespace lockstep {
namespace left_loop_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Steps = std::map<int, int64_t>;

void call(const ProcessGroup& group) {
  at::Tensor sum = at::ones({3});
  group.all_reduce(sum);
}

/// Of the failure that a rank that calls once more is told: the steps of each rank that left its
/// loop.
template <class Expected>
std::map<int, int64_t> steps_told(const ProcessGroup& group) {
  const test::Outcome outcome = test::outcome_of([&] { call(group); });
  EXPECT_TRUE(outcome.is<Expected>()) << outcome.text();
  std::map<int, int64_t> steps;
  for (const auto& rank : outcome.failure().ranks)
    if (rank.kind == Failure::Kind::left) steps[rank.number] = rank.steps;
  return steps;
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
        EXPECT_EQ(steps_told<PeerLeftError>(group), (Steps{{size - 1, steps}}));
      });
    }
  }
}

TEST_P(LeftLoop, TheMostStepsSaidCount) {
  run_group(2, [&](ProcessGroup group) {
    make_steps(group, 12);
    group.note_steps(7);  // Of a second model, say.
    if (group.rank() == 1) return;
    const std::string text = test::message_of<PeerLeftError>([&] { call(group); });
    EXPECT_THAT(text,
                AllOf(HasSubstr("rank 1"), HasSubstr(" left its loop after 12 steps\n  hint: all "
                                                     "ranks must make the same number of")));
  });
}

TEST_P(LeftLoop, WithoutStepsARankIsLost) {
  run_group(2, [&](ProcessGroup group) {
    make_steps(group, 0);
    at::Tensor sum = at::ones({3});
    group.all_reduce(sum);
    if (group.rank() == 1) return;
    const auto outcome = test::outcome_of([&] { call(group); });
    EXPECT_TRUE(outcome.is<PeerLostError>() && !outcome.is<PeerLeftError>()) << outcome.text();
    EXPECT_TRUE(outcome.failure().concerns(1));
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
                        group.set_timeout(std::chrono::seconds(3));
                        EXPECT_THROW(group.recv_any(message), PeerLostError);
                      } else {
                        EXPECT_EQ(steps_told<PeerLeftError>(group), (Steps{{3, 12}}));
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
    EXPECT_EQ(steps_told<PeerLeftError>(group), (Steps{{2, 12}}));
    // Rank 1 closes its group now, normally. Rank 0 calls again.
    if (group.rank() == 1) return;
    EXPECT_FALSE(steps_told<CommError>(group).contains(1));
  });
}

}  // namespace left_loop_test
}  // namespace lockstep
