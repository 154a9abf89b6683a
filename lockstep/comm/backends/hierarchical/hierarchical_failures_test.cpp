// Ranks and hosts that do not come, leave or are lost, over hosts that are joined.
#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "lockstep/base/error.h"
#include "lockstep/comm/backends/hierarchical/hierarchy.h"
#include "tests/support/run_hosts.h"
#include "tests/support/test_wait.h"

namespace lockstep::hierarchical {
namespace hierarchical_failures_test {

using test::expect_ok;
using test::tells;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using test_wait::wait_until;

TEST(HierarchicalBackend, ARankThatDoesNotComeIsNamedOnAllHosts) {
  for (const int late : {1, 3, 2}) {
    const auto outcomes = run(
        "aabb",
        [&](int rank, c10d::Backend& backend, const auto&) {
          all_reduce(backend, at::ones({2}));
          if (rank == late) return;
          all_reduce(backend, at::ones({4}));
        },
        500);
    EXPECT_TRUE(outcomes[static_cast<size_t>(late)].ok());
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == late) continue;
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
      EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::late, late)) << outcome.text();
      EXPECT_THAT(
          outcome.text(),
          ::testing::MatchesRegex("rank " + std::to_string(rank) +
                                  ": all_reduce\\(sum\\) of float32 \\[4\\], collective 2.*rank " +
                                  std::to_string(late) + " \\(process .*within 0.5 s.*"));
    }
  }
}

TEST(HierarchicalBackend, AHostOfWhichNobodyComesIsNamed) {
  const auto outcomes = run(
      "aabb",
      [&](int rank, c10d::Backend& backend, const auto&) {
        all_reduce(backend, at::ones({2}));
        if (rank < 2) all_reduce(backend, at::ones({400'000}));
      },
      500);
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(outcomes[rank].is<TimeoutError>()) << outcomes[rank].text();
    const Failure failure = outcomes[rank].failure();
    ASSERT_EQ(failure.ranks.size(), 1U);
    EXPECT_EQ(failure.ranks[0].number, 2);
    EXPECT_EQ(failure.ranks[0].host, (std::vector<int>{2, 3}));
  }
}

TEST(HierarchicalBackend, ARankThatLeavesFailsTheOthersAtOnce) {
  for (const int leaver : {0, 1, 3}) {
    const auto started = std::chrono::steady_clock::now();
    const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
      all_reduce(backend, at::ones({2}));
      if (rank == leaver) return backend.shutdown();
      all_reduce(backend, at::ones({400'000}));
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == leaver) continue;
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
      EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::closed, leaver)) << outcome.text();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(10));
  }
}

TEST(HierarchicalBackend, AnAbortFailsTheOthersAndWhatIsUnderWay) {
  for (const int aborter : {0, 3}) {
    const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
      if (rank == aborter) {
        Tensors mine{at::ones({400'000})};
        auto work = backend.allreduce(mine, {});
        if (aborter == 3) work->wait();
        backend.abort();
        return;
      }
      all_reduce(backend, at::ones({400'000}));
      all_reduce(backend, at::ones({4}));
    });
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == aborter) continue;
      const auto& outcome = outcomes[static_cast<size_t>(rank)];
      EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
      EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::gave_up, aborter)) << outcome.text();
    }
  }
}

// As with the rank that held it: what the message found is the cause that the others want.
// Where the store is lost to all, only the connections between the leaders can tell it.
TEST(HierarchicalBackend, WhoGivesUpAfterAMessageLostTheStoreTellsSo) {
  for (const bool to_all : {false, true}) {
    const auto outcomes = run(
        "aabb",
        [](int rank, c10d::Backend& backend, const auto&) {
          all_reduce(backend, at::ones({4}));
          if (rank != 2) return all_reduce(backend, at::ones({4}));
          Tensors data{at::ones({4})};
          EXPECT_THROW(backend.send(data, 3, 0)->wait(), PeerLostError);
          backend.abort();
        },
        20'000, c10::make_intrusive<test::StoreLostToMessages>(to_all));
    for (const size_t rank : {0, 1, 3}) {
      EXPECT_TRUE(outcomes[rank].is<PeerLostError>()) << outcomes[rank].text();
      const Failure failure = outcomes[rank].failure();
      EXPECT_TRUE(tells(failure, Failure::Kind::gave_up, 2)) << outcomes[rank].text();
      EXPECT_THAT(failure.detail,
                  ::testing::MatchesRegex("; it failed in send.to rank 3.*lost the store"))
          << "rank " << rank << (to_all ? ", lost to all" : "");
    }
  }
}

/// The first of a chain of ranks that wait for each other in two groups: it waits in the first one,
/// and gives that up when nobody comes to the second within 1.5 s.
void give_up_over_a_second_group(const std::string& hosts, int rank, c10d::Backend& first,
                                 const test::StorePtr& store) {
  const auto second = make(options_of(c10::make_intrusive<c10d::PrefixStore>("second", store),
                                      hosts, rank, std::chrono::milliseconds(1'500)))
                          .backend;
  Tensors data{at::ones({4})};
  auto work = first.allreduce(data, {});
  EXPECT_THROW(all_reduce(*second, at::ones({4})), TimeoutError);
  first.abort();
}

// The last rank is silent, and all wait for it in the end: its name must not get lost.
TEST(HierarchicalBackend, WhoeverWaitsNamesForWhomWhenAnotherRankGivesUp) {
  // A leader gives up, then a follower.
  for (const int first : {0, 1}) {
    std::atomic<int> failed{0};
    const auto outcomes = run("aaab", [&](int rank, c10d::Backend& backend, const auto& store) {
      test::BackendPtr second;
      if (rank == first) return give_up_over_a_second_group("aaab", rank, backend, store);
      second = make(options_of(c10::make_intrusive<c10d::PrefixStore>("second", store), "aaab",
                               rank, std::chrono::milliseconds(20'000)))
                   .backend;
      if (rank == 3) {
        wait_until([&] { return failed == 2; }, "the others to fail");
      } else {
        const auto guard = c10::make_scope_exit([&] { ++failed; });
        all_reduce(backend, at::ones({4}));
      }
    });
    const auto expect_named = [&](size_t rank, int awaited) {
      const auto& outcome = outcomes[rank];
      EXPECT_TRUE(outcome.is<PeerLostError>()) << outcome.text();
      EXPECT_TRUE(tells(outcome.failure(), Failure::Kind::gave_up, first)) << outcome.text();
      EXPECT_TRUE(outcome.failure().concerns(awaited)) << outcome.text();
    };
    expect_named(first == 0 ? 1 : 0, 3);
    expect_named(2, first == 0 ? 3 : 0);
  }
}

// The leader's call in the first group is late already, and looks for the cause, when the leader
// gives the group up. Whom it waited for must not get lost between the two.
TEST(HierarchicalBackend, WhoGivesUpNamesForWhomItsLateCallWaited) {
  constexpr int kTimeout = 1'300;  // Less than that of the second group.
  std::atomic<int> failed{0};
  const auto outcomes = run(
      "aab",
      [&](int rank, c10d::Backend& backend, const auto& store) {
        const auto guard = c10::make_scope_exit([&] { ++failed; });
        if (rank == 0) return give_up_over_a_second_group("aab", rank, backend, store);
        const auto second = make(options_of(c10::make_intrusive<c10d::PrefixStore>("second", store),
                                            "aab", rank, std::chrono::milliseconds(20'000)))
                                .backend;
        if (rank == 2) return wait_until([&] { return failed == 2; }, "the others to fail");
        all_reduce(backend, at::ones({4}));
      },
      kTimeout);
  EXPECT_TRUE(outcomes[1].is<CommError>()) << outcomes[1].text();
  EXPECT_TRUE(outcomes[1].failure().concerns(2)) << outcomes[1].text();
}

// Ranks that wait for messages only, which go by the group over Gloo: nothing is under way between
// the leaders, and the peer that is waited for is on the other host and alive.
TEST(HierarchicalBackend, AHostThatIsLostEndsWaitsForMessages) {
  const auto started = std::chrono::steady_clock::now();
  const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
    all_reduce(backend, at::ones({2}));
    if (rank == 2) return backend.abort();
    if (rank == 3) return;
    Tensors incoming{at::empty({4})};
    backend.recv(incoming, 3, 0)->wait();
  });
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(outcomes[rank].is<PeerLostError>()) << outcomes[rank].text();
    EXPECT_TRUE(tells(outcomes[rank].failure(), Failure::Kind::gave_up, 2))
        << outcomes[rank].text();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(15));
}

TEST(HierarchicalBackend, AHostThatIsLostEndsAGather) {
  const auto outcomes = run("aabb", [&](int rank, c10d::Backend& backend, const auto&) {
    all_reduce(backend, at::ones({2}));
    if (rank == 2) return backend.abort();
    if (rank == 3) return;
    TensorLists outputs;
    if (rank == 0) outputs.push_back(Tensors(4, at::empty({4})));
    Tensors input{at::ones({4})};
    backend.gather(outputs, input, {})->wait();
  });
  for (const size_t rank : {0, 1}) {
    EXPECT_TRUE(outcomes[rank].is<PeerLostError>()) << outcomes[rank].text();
    EXPECT_TRUE(outcomes[rank].failure().concerns(2)) << outcomes[rank].text();
  }
}

// Host b's leader meets the others and goes no further: Gloo waits for it.
TEST(HierarchicalBackend, FormingBetweenHostsTakesTheTimeOutAndNamesAHostThatWasLost) {
  for (const bool lost : {false, true}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::unique_ptr<HostLinks> links;
    auto outcomes = test::run_ranks(3, [&](int rank) {
      const auto options = options_of(store, "aab", rank, std::chrono::milliseconds(1'500));
      if (rank < 2) {
        make(options);
        return;
      }
      meet(options);
      HostLinks::Options own;
      own.store = c10::make_intrusive<c10d::PrefixStore>("links", options.store);
      own.host = 1;
      own.names = {"host a", "host b"};
      links = std::make_unique<HostLinks>(own);
      if (lost) links.reset();
    });
    EXPECT_TRUE(outcomes[2].ok()) << outcomes[2].text();
    outcomes.pop_back();
    for (const auto& outcome : outcomes) EXPECT_FALSE(outcome.ok());
    if (!lost) continue;
    EXPECT_TRUE(outcomes[0].is<PeerLostError>()) << outcomes[0].text();
    EXPECT_TRUE(outcomes[0].failure().concerns(2)) << outcomes[0].text();
  }
}

}  // namespace hierarchical_failures_test
}  // namespace lockstep::hierarchical
