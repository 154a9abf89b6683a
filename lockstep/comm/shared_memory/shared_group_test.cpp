#include "lockstep/comm/shared_memory/shared_group.h"

#include <gtest/gtest.h>

#include <array>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/cores.h"
#include "lockstep/comm/shared_memory/spin_budget.h"
#include "tests/support/run_ranks.h"

namespace lockstep::shm {
namespace {

using std::chrono::microseconds;
using testing::rethrow_first;
using testing::run_ranks;

/// How long each of two ranks looks for the other, bound to these.
std::array<std::chrono::nanoseconds, 2> spins_when_bound_to(std::array<int, 2> processors) {
  std::promise<std::string> name;
  const std::shared_future<std::string> told = name.get_future().share();
  const Meeting meeting{[&](const std::string& value) { name.set_value(value); },
                        [&] { return told.get(); }};
  std::array<std::unique_ptr<SharedGroup>, 2> groups;
  rethrow_first(run_ranks(2, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    set_allowed_processors({processors.at(at)});
    SharedGroupOptions options;
    options.segment.rank = rank;
    options.segment.size = 2;
    options.spin = microseconds(77);
    groups.at(at) = std::make_unique<SharedGroup>(options, meeting);
  }));
  return {groups[0]->spin(), groups[1]->spin()};
}

TEST(SharedGroup, LooksForOthersWhereEachRankHasAProcessor) {
  const std::vector<int> processors = allowed_processors();
  if (processors.size() < 2) GTEST_SKIP() << "needs two processors";
  const auto apart = spins_when_bound_to({processors[0], processors[1]});
  EXPECT_EQ(apart[0], microseconds(77));
  EXPECT_EQ(apart[1], microseconds(77));
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

}  // namespace
}  // namespace lockstep::shm
