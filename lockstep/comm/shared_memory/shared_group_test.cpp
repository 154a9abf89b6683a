#include "lockstep/comm/shared_memory/shared_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/shared_memory/spin_budget.h"
#include "tests/support/message_of.h"
#include "tests/support/run_ranks.h"

namespace lockstep::shm {
namespace shared_group_test {

using std::chrono::microseconds;
using test::message_of;
using test::ranks_of;
using test::rethrow_first;
using test::run_ranks;

/// One end for each rank. `before` runs on each rank's thread first.
std::vector<std::unique_ptr<SharedGroup>> make_groups(
    int size, const std::function<void(int rank)>& before = [](int) {}) {
  std::promise<std::string> name;
  const std::shared_future<std::string> told = name.get_future().share();
  const Meeting meeting{[&](const std::string& value) { name.set_value(value); },
                        [&] { return told.get(); }};
  std::vector<std::unique_ptr<SharedGroup>> groups(static_cast<size_t>(size));
  rethrow_first(run_ranks(size, [&](int rank) {
    before(rank);
    SharedGroupOptions options;
    options.rank = rank;
    options.size = size;
    groups[static_cast<size_t>(rank)] = std::make_unique<SharedGroup>(options, meeting);
  }));
  return groups;
}

/// How long each of two ranks looks for the other, bound to these.
std::array<std::chrono::nanoseconds, 2> spins_when_bound_to(std::array<int, 2> processors) {
  const auto groups = make_groups(
      2, [&](int rank) { set_allowed_processors({processors.at(static_cast<size_t>(rank))}); });
  return {groups[0]->spin(), groups[1]->spin()};
}

struct SomeCall : Call {
  uint64_t hash() const override { return 7; }
  std::string text() const override { return "barrier"; }
};

// Rank 0 gives up for a reason of its own, which may be that rank 1 is late for it, too.
TEST(SharedGroup, WhomAWaitWasForIsNamedWhenAnotherRankGivesUp) {
  const auto groups = make_groups(4);
  const SomeCall call;
  for (const size_t rank : {0, 1}) {
    groups[rank]->begin(call);
    groups[rank]->arrive();
  }
  groups[0]->fail(
      {.kind = Failure::Kind::gave_up, .ranks = {groups[0]->member(0, Failure::Kind::gave_up)}});
  const auto wait = [&] { groups[1]->await(call, std::chrono::seconds(60)); };
  EXPECT_THAT(ranks_of<PeerLostError>(wait), ::testing::ElementsAre(0, 2, 3));
  EXPECT_THAT(message_of<PeerLostError>(wait),
              ::testing::StartsWith("rank 1: barrier cannot finish: " + groups[1]->name(0) +
                                    " has given the group up; " + groups[1]->name(2) +
                                    " had not come; " + groups[1]->name(3) + " had not come"));
}

TEST(SharedGroup, OnlyTheLostRankIsNamedOtherwise) {
  const auto groups = make_groups(3);
  const SomeCall call;
  groups[1]->begin(call);
  groups[1]->arrive();
  groups[0]->fail(
      {.kind = Failure::Kind::ended, .ranks = {groups[0]->member(0, Failure::Kind::ended)}});
  const auto wait = [&] { groups[1]->await(call, std::chrono::seconds(60)); };
  EXPECT_THAT(ranks_of<PeerLostError>(wait), ::testing::ElementsAre(0));
}

TEST(SharedGroup, LooksForOthersWhereEachRankHasAProcessor) {
  const std::vector<int> processors = allowed_processors();
  if (processors.size() < 2) GTEST_SKIP() << "needs two processors";
  const auto apart = spins_when_bound_to({processors[0], processors[1]});
  EXPECT_EQ(apart[0], SharedGroup::kSpin);
  EXPECT_EQ(apart[1], SharedGroup::kSpin);
  const auto together = spins_when_bound_to({processors[0], processors[0]});
  EXPECT_LT(together[0], microseconds(10));
  EXPECT_LT(together[1], microseconds(10));
}

TEST(SpinBudget, FallsFastWhereLookingIsInVainAndRisesSlowly) {
  const microseconds within(200), beyond(501);
  SpinBudget budget(microseconds(100), microseconds(500));
  EXPECT_EQ(budget.now(), microseconds(500));
  budget.learn(within);
  EXPECT_EQ(budget.now(), microseconds(500));
  budget.learn(beyond);
  EXPECT_EQ(budget.now(), microseconds(250));
  for (int i = 0; i < 9; ++i) budget.learn(beyond);
  EXPECT_EQ(budget.now(), microseconds(100));
  budget.learn(within);
  EXPECT_EQ(budget.now(), microseconds(120)) << "though it slept before the others came";
  for (int i = 0; i < 30; ++i) budget.learn(within);
  EXPECT_EQ(budget.now(), microseconds(500));
  EXPECT_EQ(SpinBudget(microseconds(50), microseconds(7)).now(), microseconds(50));
}

}  // namespace shared_group_test
}  // namespace lockstep::shm
