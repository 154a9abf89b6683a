// What the checked backend makes of the backend's own time-outs and lost connections, and which
// groups it leaves alone.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "lockstep/base/call_origin.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/checks/check_context.h"
#include "lockstep/comm/checks/checked_backend.h"
#include "lockstep/comm/checks/failure_kind.h"
#include "lockstep/comm/checks/failure_report.h"
#include "tests/support/ended_identity.h"
#include "tests/support/run_backends.h"
#include "tests/support/test_wait.h"

namespace lockstep {
namespace checked_failure_test {

using c10d::Backend;
using test::expect_ok;
using test::Outcome;
using test::outcome_of;
using test::run_backends;
using test::run_gloo;
using test::run_ranks;
using test::tells;
using test_wait::wait_until;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

CheckedBackendOptions options_of(DebugLevel debug, int milliseconds = 20'000) {
  CheckedBackendOptions options;
  options.debug = debug;
  options.timeout = std::chrono::milliseconds(milliseconds);
  options.misses_deaths = true;  // As over Gloo.
  return options;
}

c10::intrusive_ptr<c10d::Work> all_reduce(Backend& backend, at::Tensor tensor) {
  Tensors tensors{std::move(tensor)};
  return backend.allreduce(tensors, {});
}

/// After `before` shared collectives, rank 1 stays away from rank 0's next until that has failed.
Outcome stay_away(const CheckedBackendOptions& options, int before,
                  const std::function<void(Backend&)>& call) {
  std::atomic<bool> done{false};
  Outcome first;
  const auto outcomes = run_gloo(2, options, [&](int rank, Backend& backend) {
    for (int i = 0; i < before; ++i) all_reduce(backend, at::ones({2}))->wait();
    if (rank == 0) {
      first = outcome_of([&] { call(backend); });
      done = true;
    } else {
      wait_until([&] { return done.load(); }, "rank 0 to be done");
    }
  });
  expect_ok(outcomes);
  return first;
}

TEST(CheckedFailure, BackendsTimeOutNamesOperationSequenceRanksAndSeconds) {
  const auto outcome = stay_away(options_of(DebugLevel::info, 500), 12, [](Backend& backend) {
    all_reduce(backend, at::ones({3, 4}))->wait();
  });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_THAT(outcome.text(), HasSubstr("rank 0: all_reduce(sum) of float32 [3, 4], collective 13 "
                                        "of group 'default', did not finish within 0.5 s"));
  EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::late, 1));
}

/// After `before` shared collectives the ranks reduce tensors of 3 and 4 elements.
std::vector<Outcome> differ(CheckedBackendOptions options, int before) {
  options.steps = std::make_shared<const std::atomic<int64_t>>(11);
  return run_gloo(2, options, [&](int rank, Backend& backend) {
    for (int i = 0; i < before; ++i) all_reduce(backend, at::ones({2}))->wait();
    const CallOrigin origin("gradients", "GradientAverager");
    all_reduce(backend, at::ones({3 + rank}))->wait();
  });
}

TEST(CheckedFailure, ADifferenceAfterTheComparedCallsNamesTheLevelThatComparesThemAll) {
  const auto outcomes = differ(options_of(DebugLevel::info, 1'000), 10);
  EXPECT_TRUE(std::any_of(outcomes.begin(), outcomes.end(), [](auto& rank) { return !rank.ok(); }));
  for (const auto& outcome : outcomes) {
    if (outcome.ok()) continue;
    EXPECT_THAT(outcome.text(), HasSubstr("LOCKSTEP_DEBUG=detail"));
    EXPECT_THAT(outcome.text(), HasSubstr("gradients of step 11, GradientAverager"));
  }
}

TEST(CheckedFailure, AMismatchSaysWhatTheCallIsFor) {
  for (const auto& outcome : differ(options_of(DebugLevel::detail), 0)) {
    EXPECT_TRUE(outcome.is<MismatchError>()) << outcome.text();
    EXPECT_THAT(outcome.text(), HasSubstr("float32 [3] (gradients of step 11, GradientAverager)"));
    EXPECT_THAT(outcome.text(), HasSubstr("float32 [4] (gradients of step 11, GradientAverager)"));
  }
}

TEST(CheckedFailure, SameAtDebugLevelOff) {
  const auto outcome = stay_away(options_of(DebugLevel::off, 500), 0,
                                 [](Backend& backend) { backend.barrier({})->wait(); });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::late, 1));
}

TEST(CheckedFailure, FutureFailsWithOurError) {
  const auto outcome = stay_away(options_of(DebugLevel::info, 500), 12, [](Backend& backend) {
    auto work = all_reduce(backend, at::ones({2}));
    auto future = work->getFuture();
    future->wait();
    EXPECT_TRUE(future->hasError());
    EXPECT_THROW(work->wait(), TimeoutError);
    EXPECT_FALSE(work->isSuccess());
    future->value();
  });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::late, 1));
}

TEST(CheckedFailure, MonitoredBarrier) {
  const auto outcome = stay_away(options_of(DebugLevel::off), 0, [](Backend& backend) {
    c10d::BarrierOptions options;
    options.timeout = std::chrono::milliseconds(300);
    backend.monitoredBarrier(options, true);
  });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::late, 1));
}

TEST(CheckedFailure, SendWithoutReceive) {
  const auto outcome = stay_away(options_of(DebugLevel::off, 500), 0, [](Backend& backend) {
    Tensors tensors{at::ones({7})};
    backend.send(tensors, 1, 0)->wait();
  });
  EXPECT_TRUE(outcome.is<TimeoutError>() || outcome.is<PeerLostError>()) << outcome.text();
  EXPECT_TRUE(outcome.failure().concerns(1)) << outcome.text();
}

TEST(CheckedFailure, WaitCutShortByTheCallerAsksNobody) {
  std::atomic<bool> waited{false};
  const auto outcomes = run_gloo(2, options_of(DebugLevel::off), [&](int rank, Backend& backend) {
    if (rank == 1) wait_until([&] { return waited.load(); }, "rank 0 to have waited");
    auto work = all_reduce(backend, at::ones({2}));
    if (rank == 0) {
      const auto outcome = outcome_of([&] { work->wait(std::chrono::milliseconds(30)); });
      EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
      EXPECT_TRUE(outcome.failure().ranks.empty()) << outcome.text();
      waited = true;
    }
    work->wait();
  });
  expect_ok(outcomes);
}

TEST(CheckedFailure, RankThatFailedAsWellSaysWhere) {
  // Ranks 0 and 1 each wait for a rank 2 that does not come, in different calls.
  std::atomic<int> failed{0};
  const auto outcomes =
      run_gloo(3, options_of(DebugLevel::off, 500), [&](int rank, Backend& backend) {
        if (rank == 2) {
          wait_until([&] { return failed == 2; }, "ranks 0 and 1 to fail");
          return;
        }
        const auto outcome = outcome_of([&] {
          Tensors tensors{at::ones({2})};
          if (rank == 0) {
            backend.allreduce(tensors, {})->wait();
          } else {
            backend.recv(tensors, 2, 0)->wait();
          }
        });
        ++failed;
        std::rethrow_exception(outcome.error);
      });
  EXPECT_TRUE(outcomes[0].failure().concerns(2));
  EXPECT_THAT(outcomes[0].text(), HasSubstr("rank 1 failed in recv(from rank 2) into float32 [2]"));
}

TEST(CheckedFailure, WhatAnotherRankFailedInEndsTheSentence) {
  std::atomic<int> failed{0};
  const auto outcomes =
      run_gloo(3, options_of(DebugLevel::off, 500), [&](int rank, Backend& backend) {
        if (rank == 2) return wait_until([&] { return failed == 2; }, "ranks 0 and 1 to fail");
        const auto outcome = outcome_of([&] { all_reduce(backend, at::ones({2}))->wait(); });
        ++failed;
        std::rethrow_exception(outcome.error);
      });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcomes[rank].text(), HasSubstr("failed in all_reduce(sum) of float32 [2], "));
    EXPECT_THAT(outcomes[rank].text(), ::testing::Not(HasSubstr("', (timed out)")));
    EXPECT_THAT(outcomes[rank].text(), ::testing::Not(HasSubstr("',; ")));
  }
}

TEST(CheckedFailure, LostConnectionIsPeerLost) {
  // Rank 1's backend goes away, as in a process that ends; as it is this process, nobody has ended.
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto outcome = run_ranks(2, [&](int rank) {
    const auto options = options_of(DebugLevel::off);
    auto backend =
        make_checked_backend(test::make_gloo(store, rank, 2, options.timeout), store, options);
    all_reduce(*backend, at::ones({2}))->wait();
    if (rank == 0) all_reduce(*backend, at::ones({2}))->wait();
  })[0];
  EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
  EXPECT_THAT(outcome.text(), HasSubstr("rank 0: all_reduce(sum) of float32 [2], collective 2 of "
                                        "group 'default', lost its connection to rank 1"));
}

/// One whose all-reduces never end, as Gloo's where a rank dies at the wrong moment.
class NeverEnds : public Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "never"; }
  void shutdown() override {}
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors&, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<c10d::Work>(getRank(), c10d::OpType::ALLREDUCE);
  }
};

/// Rank 0's wait in such a group, of which rank 1 has ended. `before`: what rank 1 has done.
Outcome wait_beside_a_dead_rank(
    std::chrono::milliseconds timeout,
    const std::function<void(CheckContext&, const test::StorePtr& store)>& before) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CheckContext dead(store, 1, 2, {}, "default", std::chrono::seconds(60));
  before(dead, store);
  dead.store().set(announcement_key(1), test_process::ended_identity());
  auto options = options_of(DebugLevel::info, 60'000);
  options.needs_comparison = false;
  const auto backend = make_checked_backend(c10::make_intrusive<NeverEnds>(0, 2), store, options);
  return outcome_of([&] { all_reduce(*backend, at::ones({2}))->wait(timeout); });
}

TEST(CheckedFailure, ADeathThatTheBackendMissesEndsAWait) {
  expect_ok(run_ranks(2, [](int turn) {
    const auto timeout = turn == 0 ? kNoTimeout : std::chrono::milliseconds(60'000);
    const auto begin = std::chrono::steady_clock::now();
    const auto outcome = wait_beside_a_dead_rank(timeout, [](CheckContext&, const auto&) {});
    EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
    EXPECT_THAT(outcome.text(),
                ::testing::MatchesRegex(
                    "rank 0: all_reduce.sum. of float32 \\[2\\], collective 1 of group 'default', "
                    "lost its connection to rank 1: rank 1 .process [0-9]+. has ended\n.*"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }));
}

TEST(CheckedFailure, ADeathEndsAWaitThoughTheStoreIsLostAtOnce) {
  const auto store = c10::make_intrusive<test::StoreLostToMessages>(/*to_all=*/true);
  CheckContext dead(store, 1, 2, {}, "default", std::chrono::seconds(60));
  dead.store().set(announcement_key(1), test_process::ended_identity());
  auto options = options_of(DebugLevel::info, 60'000);
  options.needs_comparison = false;
  const auto backend = make_checked_backend(c10::make_intrusive<NeverEnds>(0, 2), store, options);
  EXPECT_THROW(store->compareSet("p2p/", {}, {}), std::system_error);
  const auto outcome =
      outcome_of([&] { all_reduce(*backend, at::ones({2}))->wait(std::chrono::seconds(20)); });
  EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
}

TEST(CheckedFailure, WhoHasClosedTheGroupAndEndedEndsNoWait) {
  const auto outcome = wait_beside_a_dead_rank(
      std::chrono::seconds(3),
      [](CheckContext& dead, const auto&) { dead.tell_end(Failure::Kind::closed); });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_TRUE(outcome.failure().ranks.empty()) << outcome.text();
}

TEST(CheckedFailure, ADeadRankIsNamedThoughItHadToldOfAFailure) {
  const auto outcome = wait_beside_a_dead_rank(
      kNoTimeout, [](CheckContext& dead, const auto&) { dead.tell_failed("recv(from rank 0)"); });
  EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
  EXPECT_TRUE(outcome.failure().has(Failure::Kind::ended)) << outcome.text();
}

TEST(CheckedFailure, WhoShutsTheGroupDownTellsSoAtEveryLevel) {
  expect_ok(run_ranks(2, [](int turn) {
    const auto outcome =
        wait_beside_a_dead_rank(std::chrono::seconds(3), [&](CheckContext&, const auto& store) {
          auto options = options_of(turn == 0 ? DebugLevel::off : DebugLevel::info);
          options.needs_comparison = false;
          make_checked_backend(c10::make_intrusive<NeverEnds>(1, 2), store, options)->shutdown();
        });
    EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  }));
}

// Gloo's work for it keeps to no time-out of a wait, and does not say that it has failed.
TEST(CheckedFailure, AReduceScatterInVainEndsAtItsTimeOut) {
  const auto outcome = stay_away(options_of(DebugLevel::off, 1'500), 1, [](Backend& backend) {
    at::Tensor whole = at::ones({4}), part = at::empty({2});
    backend._reduce_scatter_base(part, whole, {})->wait();
  });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
}

TEST(CheckedFailure, ADeathIsTheCauseBeforeARankThatLeftItsLoop) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CheckContext context(store, 0, 3, {}, "default", std::chrono::seconds(60));
  for (const int rank : {1, 2}) {
    CheckContext other(store, rank, 3, {}, "default", std::chrono::seconds(60));
    other.store().set(announcement_key(rank), test_process::ended_identity());
    if (rank == 1) other.tell_end(Failure::Kind::closed, 287);
  }
  const auto lost = std::make_exception_ptr(std::runtime_error("connection closed"));
  const Failure failure = test::failure_in(translate_failure(lost, context, {}, kNoTimeout));
  ASSERT_EQ(failure.ranks.size(), 1U);
  EXPECT_TRUE(tells(failure, Failure::Kind::ended, 2));
}

/// A group whose last rank is plain Gloo, as Python's is.
std::vector<Outcome> run_mixed(const CheckedBackendOptions& options,
                               const std::function<void(int, Backend&)>& part) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](int rank) {
    if (rank < 2) announce_checks(*store, rank);
    const auto gloo = test::make_gloo(store, rank, 3, options.timeout);
    return rank < 2 ? make_checked_backend(gloo, store, options) : gloo;
  };
  return run_backends(3, make, part);
}

void collectives_and_messages(int rank, Backend& backend) {
  for (int i = 0; i < 14; ++i) {
    Tensors tensors{at::full({3}, static_cast<double>(rank), at::kFloat)};
    backend.allreduce(tensors, {})->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 3);
    if (rank == 0) backend.recv(tensors, 2, 0)->wait();
    if (rank == 2) backend.send(tensors, 0, 0)->wait();
    if (rank == 0) backend.recvAnysource(tensors, 1)->wait();
    if (rank == 1) backend.send(tensors, 0, 1)->wait();
  }
}

TEST(CheckedMixed, RankThatDoesNotTakePartIsLeftAlone) {
  for (const DebugLevel level : {DebugLevel::info, DebugLevel::detail})
    expect_ok(run_mixed(options_of(level), collectives_and_messages));
}

TEST(CheckedLevels, RanksOfDifferentLevelsAgree) {
  // Whichever rank asks first decides; a rank that is told `off` decides before all.
  for (const auto& levels : {std::pair{DebugLevel::info, DebugLevel::detail},
                             std::pair{DebugLevel::off, DebugLevel::detail}}) {
    auto store = c10::make_intrusive<c10d::HashStore>();
    const auto make = [&](int rank) {
      auto options = options_of(rank ? levels.second : levels.first);
      announce_checks(*store, rank, options.group_name, options.debug);
      return make_checked_backend(test::make_gloo(store, rank, 2, options.timeout), store, options);
    };
    expect_ok(run_backends(2, make, [](int rank, Backend& backend) {
      for (int i = 0; i < 30; ++i) {
        all_reduce(backend, at::ones({2}))->wait();
        Tensors tensors{at::ones({2})};
        (rank ? backend.send(tensors, 0, 0) : backend.recv(tensors, 1, 0))->wait();
      }
    }));
  }
}

TEST(CheckedLevels, InfoStopsAfterTheFirstAndDetailDoesNot) {
  for (const DebugLevel level : {DebugLevel::info, DebugLevel::detail}) {
    const auto outcomes = run_gloo(2, options_of(level), [](int rank, Backend& backend) {
      for (int i = 0; i < 10; ++i) all_reduce(backend, at::ones({2}))->wait();
      // Of one size in bytes, so that Gloo itself goes through.
      const auto dtype = rank == 0 ? at::kFloat : at::kInt;
      all_reduce(backend, at::zeros({2}, dtype))->wait();
    });
    for (const auto& outcome : outcomes) {
      EXPECT_EQ(outcome.ok(), level == DebugLevel::info) << outcome.text();
      EXPECT_EQ(outcome.is<MismatchError>(), level == DebugLevel::detail) << outcome.text();
    }
  }
}

}  // namespace checked_failure_test
}  // namespace lockstep
