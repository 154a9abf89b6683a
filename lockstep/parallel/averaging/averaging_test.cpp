#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "lockstep/base/error.h"
#include "lockstep/parallel/averaging/averagers.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace averaging_test {

using ::testing::HasSubstr;

class Averaging : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(Over, Averaging, test::over_backends(), test::backend_name);

/// Two parameters that say which rank they are of; the second has no gradient.
struct Parameters {
  explicit Parameters(int rank) {
    for (int i = 0; i < 2; ++i) {
      all.push_back(at::full({3, 2}, 1.0 + rank + 10 * i).requires_grad_());
    }
    all[0].mutable_grad() = at::ones({3, 2});
  }
  double value(size_t i) const { return all[i].select(0, 0)[0].item<double>(); }
  std::vector<at::Tensor> all;
};

TEST_P(Averaging, OfOneStep) {
  run_group(4, [](const ProcessGroup& group) {
    const int rank = group.rank();
    std::vector<at::Tensor> parameters{at::full({2, 2}, rank / 3.0), at::full({5}, 0.1 * rank)};
    const void* memory = parameters[1].data_ptr();
    average_parameters(parameters, group);
    EXPECT_TRUE(at::allclose(parameters[0], at::full({2, 2}, 0.5)));
    EXPECT_TRUE(at::allclose(parameters[1], at::full({5}, 0.15)));
    EXPECT_EQ(parameters[1].data_ptr(), memory);
    average_parameters(parameters, {});
    average_parameters({}, group);
  });
}

TEST_P(Averaging, EveryPeriodAfterTheWarmUp) {
  run_group(3, [](const ProcessGroup& group) {
    PeriodicModelAverager averager(3, 2, group);
    const auto averaged = [&] {
      Parameters parameters(group.rank());
      averager.average_parameters(parameters.all);
      EXPECT_EQ(parameters.value(1), 11 + group.rank()) << "it has no gradient";
      return parameters.value(0) == 2;
    };
    std::vector<bool> steps;
    for (int step = 0; step < 9; ++step) {
      steps.push_back(averaged());
    }
    // Rank 1's value is the mean anyway.
    const std::vector<bool> expected{false, false, true, false, false, true, false, false, true};
    EXPECT_TRUE(group.rank() == 1 || steps == expected);
    EXPECT_EQ(averager.step(), 9);
    averager.set_step(2);
    EXPECT_TRUE(averaged());
  });
}

TEST_P(Averaging, HierarchiesAverageOverTheLargestGroupThatIsDue) {
  run_group(4, [](const ProcessGroup& group) {
    HierarchicalModelAverager averager({{2, 2}, {4, 4}}, 1, group);
    const double own = 1 + group.rank(), pair = group.rank() < 2 ? 1.5 : 3.5, all = 2.5;
    std::vector<double> seen;
    for (int step = 0; step < 9; ++step) {
      Parameters parameters(group.rank());
      averager.average_parameters(parameters.all);
      seen.push_back(parameters.value(0));
    }
    EXPECT_EQ(seen, (std::vector<double>{own, own, pair, own, all, own, pair, own, all}));
  });
}

TEST_P(Averaging, SubgroupsAreNeighboursOrAHost) {
  run_group(4, [](const ProcessGroup& group) {
    const ProcessGroup pair = new_subgroups(group, 2);
    EXPECT_EQ(pair.size(), 2);
    EXPECT_EQ(pair.rank(), group.rank() % 2);
    const ProcessGroup host = new_subgroup_of_host(group);
    EXPECT_EQ(host.size(), 4);
    // A rank that left at once would leave others that still connect.
    pair.barrier();
    host.barrier();
  });
}

template <class Call>
std::string usage_error_of(const Call& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no UsageError";
}

TEST(Averagers, WrongUse) {
  test::run_group(
      2,
      [](const ProcessGroup& group) {
        const auto periodic = [&](int64_t period, int64_t warmup) {
          return usage_error_of([&] { PeriodicModelAverager(period, warmup, group); });
        };
        EXPECT_THAT(periodic(0, 0), HasSubstr("the period is 0"));
        EXPECT_THAT(periodic(2, -1), HasSubstr("-1 warm-up steps"));
        const auto hierarchy = [&](std::vector<std::pair<int64_t, int>> levels) {
          return usage_error_of([&] { HierarchicalModelAverager(levels, 0, group); });
        };
        EXPECT_THAT(hierarchy({}), HasSubstr("there are no periods"));
        EXPECT_THAT(hierarchy({{0, 2}}), HasSubstr("period 0 is not above 0"));
        EXPECT_THAT(hierarchy({{4, 1}, {2, 2}}), HasSubstr("period 2 is not above 4"));
        EXPECT_THAT(hierarchy({{4, 4}}),
                    HasSubstr("the last size is 4, but the group has 2 ranks"));
        EXPECT_THAT(usage_error_of([&] { new_subgroups(group, 3); }), HasSubstr("do not divide"));
        EXPECT_THAT(usage_error_of([&] { PostLocalSGDOptimizer(nullptr, {}, nullptr); }),
                    HasSubstr("null"));
      },
      {.backend = "shm"});
}

TEST_P(Averaging, PostLocalSgdAveragesAfterItsSteps) {
  run_group(2, [](const ProcessGroup& group) {
    const auto make = [&](Parameters& parameters) {
      return PostLocalSGDOptimizer(make_optimizer("sgd", parameters.all, {.lr = 0.5}),
                                   parameters.all,
                                   std::make_shared<PeriodicModelAverager>(2, 1, group));
    };
    Parameters parameters(group.rank());
    auto optimizer = make(parameters);
    optimizer.step();
    EXPECT_EQ(parameters.value(0), 0.5 + group.rank());
    optimizer.step();
    EXPECT_EQ(parameters.value(0), 0.5) << "the mean of 0 and 1";
    EXPECT_EQ(optimizer.name(), "sgd");

    // A resumed run does not warm up again.
    Parameters resumed(group.rank());
    auto other = make(resumed);
    other.load_state(optimizer.state());
    other.step();
    EXPECT_EQ(resumed.value(0), 0.5 + group.rank()) << "step 2 is not due";
    other.step();
    EXPECT_EQ(resumed.value(0), 0.5) << "step 3 is";
    other.load_state({});
    EXPECT_EQ(other.state().back().second.item<int64_t>(), 0);
  });
}

}  // namespace averaging_test
}  // namespace lockstep
