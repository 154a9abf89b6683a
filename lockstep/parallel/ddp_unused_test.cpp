// Parameters that a backward does not reach, and static graphs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace ddp_unused_test {

using ddp_test::fill;
using ddp_test::Heads;
using ddp_test::Switch;
using ddp_test::values;
using ::testing::HasSubstr;
using ::testing::Not;

at::Tensor input(int rank) {
  return values({4, 6}, 10 * rank);
}

template <class Module>
std::shared_ptr<Module> filled() {
  auto module = std::make_shared<Module>();
  fill(*module, 1);
  return module;
}

class DdpUnused : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, DdpUnused, test::over_backends(), test::backend_name);

TEST_P(DdpUnused, TheNextForwardNamesParametersWithoutGradient) {
  run_group(2, [&](ProcessGroup group) {
    auto module = filled<Switch>();
    DistributedDataParallel ddp(module, group);
    ddp(input(group.rank()), true).sum().backward();
    try {
      ddp(input(group.rank()), true);
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("right.weight, right.bias"));
      EXPECT_THAT(error.what(), Not(HasSubstr("left.weight")));
      EXPECT_THAT(error.what(), HasSubstr("find_unused_parameters"));
      EXPECT_THAT(error.what(), HasSubstr("rank " + std::to_string(group.rank())));
    }
  });
}

TEST_P(DdpUnused, FoundWhenAllRanksLeaveThemOut) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.find_unused_parameters = true;
    auto module = filled<Switch>();
    DistributedDataParallel ddp(module, group, options);
    for (const bool left : {true, true, false, true}) {
      zero_grad(module->parameters());
      ddp(input(group.rank()), left).sum().backward();
      EXPECT_EQ(module->left->weight.grad().defined(), left);
      EXPECT_EQ(module->right->weight.grad().defined(), !left);
      EXPECT_TRUE(module->body->weight.grad().defined());
    }
  });
}

TEST_P(DdpUnused, RanksThatUseDifferentOnesAverageThem) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.find_unused_parameters = true;
    auto module = filled<Switch>();
    DistributedDataParallel ddp(module, group, options);
    for (int step = 0; step < 3; ++step) {
      zero_grad(module->parameters());
      ddp(input(group.rank()), group.rank() == 0).sum().backward();
      // The bias' gradient is the batch's size on the one rank that uses it, and half on average.
      EXPECT_EQ(module->left->bias.grad().item<float>(), 2);
      EXPECT_EQ(module->right->bias.grad().item<float>(), 2);
    }
  });
}

TEST_P(DdpUnused, AnOutputThatTheLossLeavesOut) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.find_unused_parameters = true;
    auto module = filled<Heads>();
    DistributedDataParallel ddp(module, group, options);
    for (int step = 0; step < 3; ++step) {
      zero_grad(module->parameters());
      ddp(input(group.rank())).first.sum().backward();
      EXPECT_EQ(module->left->bias.grad().item<float>(), 4);
      EXPECT_FALSE(module->right->bias.grad().defined());
    }
  });
}

TEST_P(DdpUnused, StaticGraphLearnsThemOnce) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.static_graph = true;
    auto module = filled<Switch>();
    DistributedDataParallel ddp(module, group, options);
    for (int step = 0; step < 4; ++step) {
      zero_grad(module->parameters());
      ddp(input(group.rank()), true).sum().backward();
      EXPECT_EQ(module->left->bias.grad().item<float>(), 4);
      const at::Tensor mean = module->body->bias.grad().clone();
      at::Tensor other = mean.clone();
      group.broadcast(other, 0);
      EXPECT_TRUE(at::equal(mean, other));
    }
    EXPECT_TRUE(ddp.statistics().buckets_rebuilt);
  });
}

TEST_P(DdpUnused, AStaticGraphMayBeginWithinNoSync) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.static_graph = true;
    auto module = filled<Switch>();
    DistributedDataParallel ddp(module, group, options);
    {
      const auto guard = ddp.no_sync();
      ddp(input(group.rank()), true).sum().backward();
    }
    ddp(input(group.rank()), true).sum().backward();
    module->zero_grad();
    {
      const auto guard = ddp.no_sync();
      ddp(input(group.rank()), true).sum().backward();
    }
    ddp(input(group.rank()), true).sum().backward();
    at::Tensor gradient = module->left->weight.grad().clone();
    group.broadcast(gradient, 0);
    EXPECT_TRUE(at::equal(gradient, module->left->weight.grad()));
  });
}

TEST_P(DdpUnused, SeveralForwardsMayHaveTheirBackwardsLater) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.find_unused_parameters = true;
    auto module = filled<Switch>();
    DistributedDataParallel ddp(module, group, options);
    for (int step = 0; step < 3; ++step) {
      zero_grad(module->parameters());
      const at::Tensor left = ddp(input(group.rank()), true).sum();
      const at::Tensor right = ddp(input(group.rank()), group.rank() == 0).sum();
      left.backward();
      EXPECT_FALSE(module->right->bias.grad().defined());
      right.backward();
      // The batch's size: of all from the first, and of one rank of two from the second.
      EXPECT_EQ(module->left->bias.grad().item<float>(), 6);
      EXPECT_EQ(module->right->bias.grad().item<float>(), 2);
    }
  });
}

TEST_P(DdpUnused, AGraphMayOutliveTheWrapper) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.static_graph = true;
    auto module = filled<Switch>();
    at::Tensor loss;
    {
      DistributedDataParallel ddp(module, group, options);
      loss = ddp(input(group.rank()), true).sum();
    }
    loss.backward();
    EXPECT_EQ(module->left->bias.grad().item<float>(), 4);
  });
}

}  // namespace ddp_unused_test
}  // namespace lockstep
