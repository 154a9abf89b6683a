#include "lockstep/parallel/join.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/ddp.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace join_test {

using ddp_test::Counter;
using ddp_test::fill;
using ddp_test::Net;
using ddp_test::values;
using ::testing::HasSubstr;

class JoinInputs : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, JoinInputs, test::over_backends(), test::backend_name);

at::Tensor input(int rank, int step) {
  return values({4, 6}, 10 * rank + step);
}

/// How many inputs a rank has.
using Inputs = std::vector<int>;

/// What plain SGD makes of the mean over ranks, where those without an input add zeros.
std::vector<at::Tensor> expected(const Inputs& inputs, bool divide_by_all, double lr) {
  Net net;
  fill(net, 1);
  const int steps = *std::max_element(inputs.begin(), inputs.end());
  for (int step = 0; step < steps; ++step) {
    std::vector<at::Tensor> sum;
    const auto active =
        std::count_if(inputs.begin(), inputs.end(), [&](int n) { return step < n; });
    const auto divisor = divide_by_all ? static_cast<int64_t>(inputs.size()) : active;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      if (step >= inputs[rank]) continue;
      zero_grad(net.parameters());
      net.forward(input(static_cast<int>(rank), step)).square().mean().backward();
      for (size_t i = 0; i < net.parameters().size(); ++i) {
        const at::Tensor part = net.parameters()[i].grad().mul(1.0 / divisor);
        if (sum.size() == i) {
          sum.push_back(part);
        } else {
          sum[i] = sum[i] + part;
        }
      }
    }
    const c10::AutoGradMode no_grad(false);
    for (size_t i = 0; i < sum.size(); ++i) net.parameters()[i].sub_(sum[i], lr);
  }
  return net.parameters();
}

void expect_trained(const ProcessGroup& group, const Inputs& inputs, const DdpOptions& ddp_options,
                    bool divide_by_all) {
  auto net = std::make_shared<Net>();
  fill(*net, 1);
  DistributedDataParallel ddp(net, group, ddp_options);
  const auto optimizer = make_optimizer("sgd", net->parameters(), {.lr = 0.5});
  Join join({ddp}, {.divide_by_initial_world_size = divide_by_all});
  join.run([&] {
    for (int step = 0; step < inputs[static_cast<size_t>(group.rank())]; ++step) {
      zero_grad(net->parameters());
      ddp(input(group.rank(), step)).square().mean().backward();
      optimizer->step();
    }
  });
  const auto wanted = expected(inputs, divide_by_all, 0.5);
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(at::allclose(net->parameters()[i], wanted[i], 1e-5, 1e-6))
        << group.backend() << ", parameter " << i;
}

TEST_P(JoinInputs, RanksWithFewerInputsAddZeros) {
  for (const Inputs& inputs :
       {Inputs{2, 4}, Inputs{4, 2}, Inputs{0, 3}, Inputs{3, 0}, Inputs{3, 3}, Inputs{1, 4, 2}}) {
    for (const bool divide_by_all : {true, false}) {
      run_group(static_cast<int>(inputs.size()), [&](const ProcessGroup& group) {
        DdpOptions options;
        expect_trained(group, inputs, options, divide_by_all);
        options.bucket_cap_mb = options.first_bucket_mb = 1e-4;  // Several, made anew in step 2.
        expect_trained(group, inputs, options, divide_by_all);
        options.gradient_as_bucket_view = false;
        expect_trained(group, inputs, options, divide_by_all);
        options.static_graph = true;
        expect_trained(group, inputs, options, divide_by_all);
        options.static_graph = false;
        options.find_unused_parameters = true;
        expect_trained(group, inputs, options, divide_by_all);
        options.comm_hook = CommHook::allreduce;
        expect_trained(group, inputs, options, divide_by_all);
      });
    }
  }
}

TEST_P(JoinInputs, AfterItGradientsAreDividedByAllAgain) {
  run_group(2, [](const ProcessGroup& group) {
    for (const bool views : {true, false}) {
      auto net = std::make_shared<Net>();
      fill(*net, 1);
      DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = views});
      const auto backward = [&] { ddp(input(0, 1)).square().mean().backward(); };
      backward();
      const at::Tensor mean = net->first->weight.grad().clone();
      {
        Join join({ddp}, {.divide_by_initial_world_size = false});
        join.run([&] {
          for (int step = 0; step < 2 * group.rank(); ++step) backward();
        });
      }
      zero_grad(net->parameters());
      backward();
      EXPECT_TRUE(at::equal(net->first->weight.grad(), mean)) << views;
    }
  });
}

TEST_P(JoinInputs, AccumulationWithinNoSync) {
  run_group(2, [](const ProcessGroup& group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group);
    Join join({ddp});
    join.run([&] {
      for (int step = 0; step < 2 * (group.rank() + 1); ++step) {
        const auto backward = [&] { ddp(input(group.rank(), step)).square().mean().backward(); };
        if (step % 2 == 0) {
          const auto guard = ddp.no_sync();
          backward();
        } else {
          backward();
        }
      }
    });
  });
}

TEST_P(JoinInputs, BuffersAreThoseOfARankThatTrains) {
  run_group(2, [](const ProcessGroup& group) {
    auto module = std::make_shared<Counter>();
    DistributedDataParallel ddp(module, group);
    Join join({ddp});
    join.run([&] {
      // Rank 0, whose buffers go to all, has no inputs after the first.
      for (int step = 0; step < (group.rank() == 0 ? 1 : 3); ++step) {
        ddp(input(group.rank(), step)).sum().backward();
        module->seen.add_(1);
      }
    });
    EXPECT_EQ(module->seen[0].item<float>(), 3) << "rank " << group.rank();
  });
}

TEST_P(JoinInputs, EarlyEndThrowsOnAllRanks) {
  run_group(3, [](const ProcessGroup& group) {
    auto net = std::make_shared<Net>();
    fill(*net, 1);
    DistributedDataParallel ddp(net, group);
    Join join({ddp}, {.throw_on_early_termination = true});
    try {
      join.run([&] {
        for (int step = 0; step < 1 + group.rank(); ++step)
          ddp(input(group.rank(), step)).sum().backward();
      });
      ADD_FAILURE() << "rank " << group.rank() << " did not throw";
    } catch (const MismatchError& error) {
      EXPECT_THAT(error.what(), HasSubstr("no inputs left"));
      EXPECT_THAT(error.what(), HasSubstr("throw_on_early_termination"));
    }
  });
}

/// The counter of PyTorch's tutorial: how many inputs all ranks had.
class InputCounter : public Joinable {
 public:
  explicit InputCounter(ProcessGroup group) : group_(std::move(group)) {}
  void operator()() {
    Join::notify_join_context(*this);
    add(1);
  }
  int64_t count() const { return count_; }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    struct Hook : JoinHook {
      explicit Hook(InputCounter& counter) : counter(counter) {}
      void main_hook() override { counter.add(0); }
      void post_hook(bool is_last_joiner) override { counter.was_last = is_last_joiner; }
      InputCounter& counter;
    };
    return std::make_unique<Hook>(*this);
  }
  const ProcessGroup& join_process_group() const override { return group_; }
  bool was_last = false;

 private:
  void add(int64_t mine) {
    at::Tensor all = at::full({1}, mine, at::kLong);
    group_.all_reduce(all);
    count_ += all.item<int64_t>();
  }
  ProcessGroup group_;
  int64_t count_ = 0;
};

TEST_P(JoinInputs, CollectivesOfTheUsersOwn) {
  run_group(3, [](const ProcessGroup& group) {
    InputCounter first(group), second(group);
    {
      Join join({first, second});
      EXPECT_TRUE(first.joins());
      join.run([&] {
        for (int i = 0; i < 2 + group.rank(); ++i) first(), second();
      });
    }
    EXPECT_FALSE(first.joins());
    EXPECT_EQ(first.count(), 2 + 3 + 4);
    EXPECT_EQ(second.count(), 2 + 3 + 4);
    EXPECT_EQ(first.was_last, group.rank() == 2);
  });
}

TEST_P(JoinInputs, WhatTheLoopThrowsLeavesAtOnce) {
  run_group(1, [](const ProcessGroup& group) {
    InputCounter counter(group);
    Join join({counter});
    EXPECT_THROW(join.run([] { throw DataError("no file"); }), DataError);
  });
}

TEST(Join, WrongUse) {
  EXPECT_THROW(Join({}), UsageError);
  test::run_group(2, [](const ProcessGroup& group) {
    const ProcessGroup other = group.split(0);
    InputCounter a(group), b(other);
    EXPECT_THROW(Join({a, b}), UsageError);
    auto net = std::make_shared<Net>();
    DdpOptions options;
    options.custom_hook = [](const ProcessGroup&, GradientBucket& bucket) {
      return bucket.gradients;
    };
    DistributedDataParallel ddp(net, group, options);
    EXPECT_THROW(Join({ddp}), UsageError);
    // Switched off, nothing is told.
    Join off({a}, {.enable = false});
    off.run([] {});
    EXPECT_FALSE(a.joins());
  });
}

}  // namespace join_test
}  // namespace lockstep
