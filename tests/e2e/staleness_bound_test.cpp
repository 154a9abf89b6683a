// What the parameter server's example promises of trainers that wait for each other.
#include "003_rpc/staleness_bound.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "tests/support/joined_worker.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace rpc_tutorial {
namespace staleness_bound_test_cases {

using namespace std::chrono_literals;
using lockstep::rpc::Agent;
using lockstep::rpc::call;
using lockstep::rpc::function;
using lockstep::rpc::test::run_workers;
using lockstep::test_wait::wait_until;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kSteps = 20;

/// The steps that this worker has begun.
std::atomic<int64_t> begun = 0;
const auto begun_there = function("begun", [] { return begun.load(); });
std::atomic<bool> may_go_on = false;
const auto go_on = function("go_on", [] { may_go_on = true; });

const auto get_clocks = function("get_clocks", [](const std::vector<std::string>& trainers) {
  static const auto clocks = std::make_shared<StepClocks>(trainers);
  return clocks;
});
/// They lie with w0.
auto clocks_of(const std::vector<std::string>& trainers) {
  return lockstep::rpc::remote("w0", get_clocks, trainers);
}

/// Worker w2 begins when w1 has made as many steps as it may.
void train(const Agent& agent, int rank, int64_t max_staleness) {
  StalenessBound bound(agent, clocks_of({"w1", "w2"}), max_staleness);
  const std::string other = rank == 1 ? "w2" : "w1";
  if (rank == 2) {
    wait_until([&] { return call(other, begun_there) >= max_staleness; }, "the first steps of w1");
  }
  for (int64_t i = 1; i <= kSteps; ++i) {
    ++begun;
    const int64_t ahead = bound.step();
    EXPECT_LE(ahead, max_staleness);
    EXPECT_GE(ahead, 0);
    // What it has begun is no less than its clock was.
    EXPECT_GE(call(other, begun_there), i - max_staleness);
  }
  EXPECT_EQ(bound.clock(), kSteps);
  bound.finish();
  EXPECT_EQ(call(other, begun_there), kSteps);
}

TEST(StalenessBound, NobodyGetsFurtherAheadThanTheBound) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank > 0) train(agent, rank, 3);
  });
}

TEST(StalenessBound, WithABoundOfNoneAllGoInStep) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank > 0) train(agent, rank, 0);
  });
}

TEST(StalenessBound, WithoutABoundNobodyWaitsAndTheEndIsTogether) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank == 0) return;
    StalenessBound bound(agent, clocks_of({"w1", "w2"}), {});
    if (rank == 2) wait_until([] { return may_go_on.load(); }, "the other one's steps");
    for (int64_t i = 1; i <= kSteps; ++i) {
      ++begun;
      const int64_t ahead = bound.step();
      if (rank == 1) {
        EXPECT_EQ(ahead, i);
      }
    }
    if (rank == 1) call("w2", go_on);
    bound.finish();
    EXPECT_EQ(call(rank == 1 ? "w2" : "w1", begun_there), kSteps);
  });
}

TEST(StalenessBound, TheOwnerOfTheClocksMayTakePart) {
  run_workers(2, [](Agent& agent, int) {
    StalenessBound bound(agent, clocks_of({"w0", "w1"}), 1);
    for (int64_t i = 0; i < kSteps; ++i) EXPECT_LE(bound.step(), 1);
    bound.finish();
  });
}

TEST(StalenessBound, NobodyWaitsForTheDead) {
  // Were they waited for, it would take ten minutes.
  run_workers(4, [](Agent& agent, int rank) {
    if (rank == 0) {  // w3 dies before it takes part, w2 while w1 waits for it.
      wait_until([&] { return agent.lost_workers().size() == 2; }, "the losses");
    } else if (rank == 3) {
      ::_exit(0);
    } else {
      StalenessBound bound(agent, clocks_of({"w1", "w2", "w3"}), 0, 600s);
      if (rank == 2) {
        wait_until([] { return call("w1", begun_there) == 1; }, "the step of w1");
        ::_exit(0);
      }
      ++begun;
      for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
      bound.finish();
    }
  });
}

TEST(StalenessBound, DISABLED_InTheDeadOnesPlace) {
  Agent agent = lockstep::rpc::test::join_group();
  StalenessBound bound(agent, clocks_of({"w1", "w2"}), 0, 600s);
  for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
  bound.finish();
  agent.shutdown();
}

TEST(StalenessBound, TheDeadOneDoesNotCountForTheOneInItsPlace) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank == 2) ::_exit(0);
    wait_until([&] { return !agent.lost_workers().empty(); }, "the loss");
    if (rank == 0) {
      lockstep::rpc::test::expect_success(lockstep::rpc::test::start_joining(
          agent.address(), "w2", "StalenessBound.DISABLED_InTheDeadOnesPlace"));
      return;
    }
    wait_until([&] { return agent.lost_workers().empty(); }, "the new one");
    StalenessBound bound(agent, clocks_of({"w1", "w2"}), 0, 600s);
    for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
    bound.finish();
  });
}

TEST(StalenessBound, WhoLeavesOrComesLaterHoldsNobodyUp) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank == 0) return;
    if (rank == 1) {
      StalenessBound bound(agent, clocks_of({"w1"}), 2, 600s);
      for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
      call("w2", go_on);
      wait_until([] { return may_go_on.load(); }, "the other one to have come");
      // It leaves without a step.
      for (int64_t i = 0; i < kSteps; ++i) EXPECT_LE(bound.step(), 2);
      bound.finish();
    } else {
      wait_until([] { return may_go_on.load(); }, "the other one's steps");
      const StalenessBound late(agent, clocks_of({"w1"}), 2);
      EXPECT_EQ(late.clock(), kSteps);
      call("w1", go_on);
    }
  });
}

TEST(StalenessBound, AWaitInWhichNobodyStepsEndsAndNamesThem) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank == 0) return;
    StalenessBound bound(agent, clocks_of({"w1", "w2"}), 1, 100ms);
    if (rank == 2) {
      wait_until([] { return may_go_on.load(); }, "the other one");
      return;
    }
    EXPECT_EQ(bound.step(), 1);
    try {
      bound.step();
      ADD_FAILURE() << "w2 has made no step";
    } catch (const lockstep::TimeoutError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'w2' at step 0"), Not(HasSubstr("'w1'"))));
    }
    call("w2", go_on);
  });
}

TEST(StalenessBound, AWaitGoesOnWhileOthersStep) {
  run_workers(3, [](Agent& agent, int rank) {
    if (rank == 0) return;
    constexpr auto kTimeout = 300ms;
    StalenessBound bound(agent, clocks_of({"w1", "w2"}), 1, kTimeout);
    const auto end = std::chrono::steady_clock::now() + 5 * kTimeout;
    // The other one has finished, and waits for these steps.
    while (rank == 2 && std::chrono::steady_clock::now() < end) bound.step();
    bound.finish();
  });
}

}  // namespace staleness_bound_test_cases
}  // namespace rpc_tutorial
