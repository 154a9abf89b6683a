#include "lockstep/recovery/shared_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/over_backends.h"

namespace lockstep::detail {
namespace shared_state_test {

class SharedState : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(Over, SharedState, test::over_backends(), test::backend_name);

NamedPart part_of(const std::string& name, StateDict& state) {
  return {name,
          {.get = [&state] { return state; },
           .set = [&state](const StateDict& other) { state = other; }}};
}

StateDict state_of(int rank) {
  return {{"weight", at::full({2, 3}, rank + 0.5, at::kDouble)},
          {"count", at::scalar_tensor(100 + rank, at::kLong)},
          {"nothing", at::empty({0, 4})}};
}

TEST_P(SharedState, OfTheRankThatIsFurthest) {
  run_group(3, [](const ProcessGroup& group) {
    StateDict state = state_of(group.rank());
    if (group.rank() == 2) state.pop_back();  // It has just begun.
    const StateProgress own{.complete = group.rank() != 2, .commits = group.rank() == 1 ? 8 : 7};
    const auto progress = share_state({part_of("state", state)}, own, group);
    EXPECT_TRUE(progress.complete);
    EXPECT_EQ(progress.commits, 8);
    ASSERT_EQ(state.size(), 3U);
    EXPECT_TRUE(state[0].second.equal(at::full({2, 3}, 1.5, at::kDouble)));
    EXPECT_EQ(state[1].second.item<int64_t>(), 101);
    EXPECT_EQ(state[2].second.sizes().vec(), (std::vector<int64_t>{0, 4}));
  });
}

TEST_P(SharedState, AnIncompleteOneCountsForNothing) {
  run_group(2, [](const ProcessGroup& group) {
    StateDict state = state_of(group.rank());
    const StateProgress own{.complete = group.rank() == 1, .commits = group.rank() == 1 ? 2 : 9};
    EXPECT_EQ(share_state({part_of("state", state)}, own, group).commits, 2);
    EXPECT_EQ(state[1].second.item<int64_t>(), 101);
  });
}

TEST_P(SharedState, IsLeftAloneWhereAllAreAlike) {
  run_group(2, [](const ProcessGroup& group) {
    NamedPart part{"state",
                   {.get = []() -> StateDict { throw Error("it was asked for"); },
                    .set = [](const StateDict&) { throw Error("it was replaced"); }}};
    EXPECT_EQ(share_state({part}, {.complete = true, .commits = 5}, group).commits, 5);
  });
}

TEST_P(SharedState, OfNobodyIsAnErrorUnlessAllMayBegin) {
  run_group(2, [](const ProcessGroup& group) {
    EXPECT_THROW(share_state({}, {}, group), Error);
    const auto progress = share_state({}, {}, group, /*may_begin=*/true);
    EXPECT_TRUE(progress.complete && progress.begins);
  });
}

TEST_P(SharedState, PartsOfOtherNamesAreAMismatch) {
  run_group(2, [](const ProcessGroup& group) {
    StateDict state = state_of(0);
    const std::string name = group.rank() == 0 ? "model" : "optimizer";
    EXPECT_THROW(share_state({part_of(name, state)}, {.complete = true, .commits = 0}, group),
                 MismatchError);
  });
}

}  // namespace shared_state_test
}  // namespace lockstep::detail
