#include "lockstep/comm/check_equal.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace check_equal_test {

using detail::Compared;
using ::testing::ElementsAre;

/// What the error of each rank names.
struct Named {
  std::string detail;
  std::vector<int> ranks;
};

/// All ranks must throw alike. Empty where none does.
std::vector<Named> named_by(const std::string& backend, int size,
                            const std::function<void(Compared&, int rank)>& change) {
  std::vector<Named> all(static_cast<size_t>(size));
  test::run_group(
      size,
      [&](ProcessGroup group) {
        const at::Tensor a = at::arange(12, at::kFloat).reshape({3, 4});
        Compared mine{.what = "test", .steps = 10};
        mine.tensors = {{"a", a.t()}, {"count", at::full({}, 7, at::kLong)}, {"b", a.sin()}};
        mine.settings = {{"lr", 0.1}};
        mine.tensors.back().second[0][0] = std::numeric_limits<float>::quiet_NaN();
        change(mine, group.rank());
        try {
          detail::check_equal(mine, group);
        } catch (const MismatchError& error) {
          all[static_cast<size_t>(group.rank())] = {error.failure().detail, error.ranks()};
          return;
        }
      },
      {.backend = backend, .hosts = backend == "hierarchical" ? "aab" : ""});
  for (const Named& one : all) {
    EXPECT_EQ(one.detail, all.front().detail);
    EXPECT_EQ(one.ranks, all.front().ranks);
  }
  return all;
}

class EachBackend : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, EachBackend, ::testing::Values("shm", "gloo", "hierarchical"),
                         [](const auto& info) { return info.param; });

TEST_P(EachBackend, NamesTheFirstThatDiffersAndTheRanksThatDifferFromTheOthers) {
  const auto expect = [&](const std::string& name, const std::vector<int>& ranks,
                          const std::function<void(Compared&)>& change) {
    const Named named = named_by(GetParam(), 3, [&](Compared& mine, int rank) {
                          if (std::ranges::count(ranks, rank) > 0) change(mine);
                        }).front();
    EXPECT_EQ(named.detail, name);
    EXPECT_EQ(named.ranks, ranks);
  };
  expect("steps", {1}, [](Compared& mine) { mine.what = "another comparison of a step"; });
  expect("a", {1}, [](Compared& mine) { mine.tensors[0].second[2][1] += 0.5; });
  expect("b", {0}, [](Compared& mine) { mine.tensors[2].second[1][1] += 0.5; });
  expect("b", {2}, [](Compared& mine) { mine.tensors[2].second[1][1].fill_(0.0 / 0.0); });
  expect("count", {2}, [](Compared& mine) { mine.tensors[1].second += 1; });
  expect("b", {2}, [](Compared& mine) { mine.tensors[2].second = at::zeros({2}); });
  expect("added", {1}, [](Compared& mine) { mine.tensors.emplace_back("added", at::ones({1})); });
  expect("lr", {1}, [](Compared& mine) { mine.settings["lr"] = 0.2; });
  expect("steps", {2}, [](Compared& mine) { mine.steps = 9; });
  expect("", {}, [](Compared&) {});
}

/// Ranks with another processor or number of threads are not to be ended.
TEST_P(EachBackend, RoundingIsNoDifference) {
  const auto all = named_by(GetParam(), 3, [](Compared& mine, int rank) {
    mine.tensors.pop_back();
    if (rank == 1) mine.tensors[0].second *= 1 + 2e-7;
  });
  EXPECT_EQ(all.front().detail, "");
}

TEST(CheckEqual, IsMadeAfterStepsThatBecomeRarer) {
  std::vector<int64_t> steps;
  for (int64_t step = 0; step <= 10'000; ++step) {
    if (detail::is_compared_after(step)) steps.push_back(step);
  }
  EXPECT_THAT(steps, ElementsAre(2, 10, 100, 1000, 10'000));
}

}  // namespace check_equal_test
}  // namespace lockstep
