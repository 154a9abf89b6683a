#include "lockstep/rpc/staleness_bound.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "lockstep/rpc/step_clocks.h"
#include "tests/support/joined_worker.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc {
namespace staleness_bound_test {

using namespace std::chrono_literals;
using test_wait::wait_until;
using ::testing::HasSubstr;
using test::run_workers;

constexpr int64_t kSteps = 20;

/// The steps that this worker has begun.
std::atomic<int64_t> begun = 0;
const auto begun_there = function("staleness.begun", [] { return begun.load(); });
std::atomic<bool> may_go_on = false;
const auto go_on = function("staleness.go_on", [] { may_go_on = true; });

StalenessOptions both(std::optional<int64_t> max_staleness) {
  return {.workers = {"w1", "w2"}, .max_staleness = max_staleness};
}

/// Worker w2 begins when w1 has made as many steps as it may.
void train(int rank, int64_t max_staleness) {
  StalenessBound bound("w0", both(max_staleness));
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

TEST(RpcStaleness, NobodyGetsFurtherAheadThanTheBound) {
  run_workers(3, [](Agent&, int rank) {
    if (rank > 0) train(rank, 3);
  });
}

TEST(RpcStaleness, WithABoundOfNoneAllGoInStep) {
  run_workers(3, [](Agent&, int rank) {
    if (rank > 0) train(rank, 0);
  });
}

TEST(RpcStaleness, WithoutABoundNobodyWaitsAndTheEndIsTogether) {
  run_workers(3, [](Agent&, int rank) {
    if (rank == 0) return;
    StalenessBound bound("w0", both({}));
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

TEST(RpcStaleness, TheServerMayTakePart) {
  run_workers(2, [](Agent&, int) {
    StalenessBound bound("w0", {.workers = {"w0", "w1"}, .max_staleness = 1});
    for (int64_t i = 0; i < kSteps; ++i) EXPECT_LE(bound.step(), 1);
    bound.finish();
  });
}

TEST(RpcStaleness, NobodyWaitsForTheDead) {
  // Were they waited for, it would take ten minutes.
  run_workers(4,
              [](Agent& agent, int rank) {
                if (rank == 0) {  // w3 dies before it takes part, w2 while w1 waits for it.
                  wait_until([&] { return agent.lost_workers().size() == 2; }, "the losses");
                } else if (rank == 3) {
                  ::_exit(0);
                } else {
                  StalenessBound bound("w0", {.workers = {"w1", "w2", "w3"}, .max_staleness = 0});
                  if (rank == 2) {
                    wait_until([] { return call("w1", begun_there) == 1; }, "the step of w1");
                    ::_exit(0);
                  }
                  ++begun;
                  for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
                  bound.finish();
                }
              },
              {.timeout = 600s});
}

// What the dead worker sent may be read when another one has its name.
using detail::StepClocks;
const Function<StepClocks::Part(std::string, StepClocks::Terms, std::string, int)> enter(
    "lockstep.rpc.clocks.enter");
const auto enter_for_the_dead = function("staleness.enter_for_the_dead", [] {
  EXPECT_THROW(call("w0", enter, "steps", StepClocks::Terms{{"w1", "w2"}, 0, {}}, "w2", 2),
               RemoteError);
});

TEST(RpcStaleness, DISABLED_InTheDeadOnesPlace) {
  Agent agent = test::join_group();
  StalenessBound bound("w0", both(0));
  call("w1", enter_for_the_dead);
  for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
  bound.finish();
  agent.shutdown();
}

TEST(RpcStaleness, TheDeadOneDoesNotCountForTheOneInItsPlace) {
  run_workers(3,
              [](Agent& agent, int rank) {
                if (rank == 2) ::_exit(0);
                wait_until([&] { return !agent.lost_workers().empty(); }, "the loss");
                if (rank == 0) {
                  test::expect_success(test::start_joining(
                      agent.address(), "w2", "RpcStaleness.DISABLED_InTheDeadOnesPlace"));
                  return;
                }
                wait_until([&] { return agent.lost_workers().empty(); }, "the new one");
                StalenessBound bound("w0", both(0));
                for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
                bound.finish();
              },
              {.timeout = 600s});
}

TEST(RpcStaleness, WhoseNameAnotherOneHasIsGoneAlone) {
  const auto clocks = std::make_shared<StepClocks>();
  const auto is_here = [](const std::string&) { return true; };
  const auto enter_as = [&](const std::string& name, int id) {
    return clocks->enter("steps", {{"w1", "w2"}, 9, {}}, name, id, is_here);
  };
  const auto part = enter_as("w1", 1);
  const auto slowest_after = [&](int64_t clock) {
    return clocks->reach("steps", part.number, clock).wait().slowest;
  };
  EXPECT_EQ(slowest_after(1), 0);
  clocks->gone(2, "w2", /*name_is_free=*/false);  // The one that has the name has not come yet.
  EXPECT_EQ(slowest_after(2), 0);
  clocks->gone(3, "w2", /*name_is_free=*/true);
  EXPECT_EQ(slowest_after(3), 3);
  EXPECT_EQ(enter_as("w2", 4).clock, 3);
  EXPECT_THROW(enter_as("w2", 2), UsageError);
}

TEST(RpcStaleness, WhoLeavesOrComesLaterHoldsNobodyUp) {
  run_workers(3,
              [](Agent&, int rank) {
                if (rank == 0) return;
                if (rank == 1) {
                  StalenessBound bound("w0", {.workers = {"w1"}, .max_staleness = 2});
                  for (int64_t i = 0; i < kSteps; ++i) EXPECT_EQ(bound.step(), 0);
                  call("w2", go_on);
                  wait_until([] { return may_go_on.load(); }, "the other one to have come");
                  // It leaves without a step.
                  for (int64_t i = 0; i < kSteps; ++i) EXPECT_LE(bound.step(), 2);
                  bound.finish();
                } else {
                  wait_until([] { return may_go_on.load(); }, "the other one's steps");
                  const StalenessBound late("w0", {.workers = {"w1"}, .max_staleness = 2});
                  EXPECT_EQ(late.clock(), kSteps);
                  call("w1", go_on);
                }
              },
              {.timeout = 600s});
}

TEST(RpcStaleness, AWaitInWhichNobodyStepsEndsAndNamesThem) {
  run_workers(3, [](Agent&, int rank) {
    if (rank == 0) return;
    auto options = both(1);
    options.timeout = 100ms;
    StalenessBound bound("w0", options);
    if (rank == 2) {
      wait_until([] { return may_go_on.load(); }, "the other one");
      return;
    }
    EXPECT_EQ(bound.step(), 1);
    try {
      bound.step();
      ADD_FAILURE() << "w2 has made no step";
    } catch (const TimeoutError& error) {
      EXPECT_THAT(error.what(), HasSubstr("at step 2 of the bound 'steps' on worker 'w0': waited "
                                          "for 'w2' at step 0. Nobody made a step for 0.1 s"));
    }
    call("w2", go_on);
  });
}

TEST(RpcStaleness, AWaitGoesOnWhileOthersStep) {
  run_workers(3, [](Agent&, int rank) {
    if (rank == 0) return;
    auto options = both(1);
    options.timeout = 300ms;
    StalenessBound bound("w0", options);
    const auto end = std::chrono::steady_clock::now() + 5 * *options.timeout;
    // The other one has finished, and waits for these steps.
    while (rank == 2 && std::chrono::steady_clock::now() < end) bound.step();
    bound.finish();
  });
}

template <class F>
std::string remote_error_of(const F& run) {
  try {
    run();
  } catch (const RemoteError& error) {
    EXPECT_EQ(error.type(), "lockstep::UsageError");
    return error.message();
  }
  ADD_FAILURE() << "no such error";
  return {};
}

// Each option may be left out, without a word of the compiler.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wmissing-field-initializers"
const StalenessOptions kNoWorkers{.max_staleness = 1};
const StalenessOptions kNameAlone{.name = "other"};
const BatchOptions kDelayAlone{.delay = 1ms};
const Options kLastAlone{.fast_calls = false};
#pragma GCC diagnostic pop

TEST(RpcStaleness, WhatDoesNotFitIsAnError) {
  run_workers(2, [](Agent&, int rank) {
    if (rank == 0) return;
    const auto make = [](const StalenessOptions& options) {
      return [options] { const StalenessBound bound("w0", options); };
    };
    EXPECT_THAT(remote_error_of(make(kNoWorkers)), HasSubstr("'steps': no workers"));
    EXPECT_THAT(remote_error_of(make(kNameAlone)), HasSubstr("'other': no workers"));
    EXPECT_THAT(remote_error_of(make({.workers = {"w1", "w7"}})),
                HasSubstr("unknown worker 'w7'; did you mean"));
    EXPECT_THAT(remote_error_of(make({.workers = {"w1"}, .max_staleness = -1})),
                HasSubstr("max_staleness is -1; expected at least 0, or none"));
    EXPECT_THAT(remote_error_of(make({.workers = {"w1"}, .timeout = 0ms})), HasSubstr("timeout"));
    EXPECT_THROW(StalenessBound("w7", {.workers = {"w1"}}), UsageError);

    StalenessBound first("w0", {.workers = {"w1"}, .max_staleness = 1});
    EXPECT_THAT(remote_error_of(make({.workers = {"w1"}, .max_staleness = 2})),
                HasSubstr("'steps': worker 'w1' gives workers 'w1', max_staleness 2, timeout none; "
                          "another one gave workers 'w1', max_staleness 1"));
    const StalenessBound other("w0", {.workers = {"w1"}, .name = "other"});
    const StalenessBound again("w0", {.workers = {"w1"}, .max_staleness = 1});
    EXPECT_THAT(remote_error_of([&] { first.step(); }), HasSubstr("takes no part any more"));
  });
}

}  // namespace staleness_bound_test
}  // namespace lockstep::rpc
