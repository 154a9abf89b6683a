#include "lockstep/parallel/ddp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace ddp_test_cases {

using ddp_test::Counter;
using ddp_test::fill;
using ddp_test::Lookup;
using ddp_test::Net;
using ddp_test::Rich;
using ddp_test::Tied;
using ddp_test::values;

template <class Module, class... Args>
std::shared_ptr<Module> filled(double seed, Args... args) {
  auto module = std::make_shared<Module>(args...);
  fill(*module, seed);
  return module;
}

at::Tensor input(int rank, int step = 0) {
  return values({4, 6}, 10 * rank + step);
}

std::vector<at::Tensor> gradients(torch::nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& parameter : module.parameters()) all.push_back(parameter.grad());
  return all;
}

/// What each rank's backward gives alone, divided and summed in the order of ranks, as Gloo and the
/// reducer do for two ranks.
template <class Module, class Loss>
std::vector<at::Tensor> averaged(int ranks, double seed, Loss loss) {
  std::vector<at::Tensor> sum;
  for (int rank = 0; rank < ranks; ++rank) {
    auto module = filled<Module>(seed);
    loss(*module, rank);
    const auto parts = gradients(*module);
    sum.resize(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].defined()) continue;
      const at::Tensor part = parts[i].div(ranks);
      sum[i] = sum[i].defined() ? sum[i] + part : part;
    }
  }
  return sum;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
  }
}

class Ddp : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Ddp, test::over_backends(), test::backend_name);

TEST_P(Ddp, AveragesGradientsOverRanks) {
  const auto expected = averaged<Net>(
      2, 1, [](Net& net, int rank) { net.forward(input(rank)).square().sum().backward(); });
  for (const bool view : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      DdpOptions options;
      options.gradient_as_bucket_view = view;
      // Only rank 0's parameters count.
      auto net = filled<Net>(1 + 5 * group.rank());
      DistributedDataParallel ddp(net, group, options);
      for (int step = 0; step < 4; ++step) {
        zero_grad(net->parameters());
        ddp(input(group.rank())).square().sum().backward();
        expect_equal(gradients(*net), expected);
      }
    });
  }
}

TEST_P(Ddp, ThreeRanks) {
  const auto expected = averaged<Net>(
      3, 1, [](Net& net, int rank) { net.forward(input(rank)).square().sum().backward(); });
  run_group(3, [&](ProcessGroup group) {
    auto net = filled<Net>(1);
    DistributedDataParallel ddp(net, group);
    ddp(input(group.rank())).square().sum().backward();
    const auto got = gradients(*net);
    // Three ranks' sum has no one order.
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6));
  });
}

TEST_P(Ddp, BroadcastsParametersAndBuffersAtStart) {
  run_group(2, [&](ProcessGroup group) {
    auto module = filled<Counter>(group.rank());
    module->seen.fill_(group.rank() + 3);
    module->steps.fill_(group.rank() + 9);
    DistributedDataParallel ddp(module, group);
    expect_equal(module->parameters(), filled<Counter>(0)->parameters());
    EXPECT_EQ(module->seen[1].item<float>(), 3);
    EXPECT_EQ(module->steps.item<int64_t>(), 9);
    EXPECT_TRUE(module->parameters()[0].requires_grad());
  });
}

TEST_P(Ddp, BroadcastsBuffersBeforeEachForwardUnlessTold) {
  for (const bool broadcast : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      DdpOptions options;
      options.broadcast_buffers = broadcast;
      auto module = filled<Counter>(0);
      DistributedDataParallel ddp(module, group, options);
      const float own = static_cast<float>(group.rank() + 1);
      module->seen.fill_(own);
      ddp(input(0)).sum().backward();
      EXPECT_EQ(module->seen[0].item<float>(), broadcast ? 1 : own);
    });
  }
}

TEST_P(Ddp, TwoForwardsOfABatchNormMayHaveOneBackward) {
  run_group(2, [&](ProcessGroup group) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 1));
    DistributedDataParallel ddp(net, group);
    const at::Tensor fake = ddp.forward(input(group.rank()));
    const at::Tensor real = ddp.forward(input(group.rank(), 1));
    EXPECT_NO_THROW((fake.mean() - real.square().mean()).backward());
    for (const at::Tensor& gradient : gradients(*net)) {
      at::Tensor sent = gradient.clone();
      group.broadcast(sent, 0);
      EXPECT_TRUE(at::equal(sent, gradient));
    }
  });
}

TEST_P(Ddp, NoSyncAccumulatesAndTheNextBackwardAveragesTheSum) {
  const auto expected = averaged<Net>(2, 1, [](Net& net, int rank) {
    net.forward(input(rank, 1)).square().sum().backward();
    net.forward(input(rank, 2)).square().sum().backward();
  });
  const auto local = averaged<Net>(
      1, 1, [](Net& net, int) { net.forward(input(0, 1)).square().sum().backward(); });
  for (const bool view : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      DdpOptions options;
      options.gradient_as_bucket_view = view;
      auto net = filled<Net>(1);
      DistributedDataParallel ddp(net, group, options);
      for (int round = 0; round < 3; ++round) {
        zero_grad(net->parameters());
        {
          const auto guard = ddp.no_sync();
          ddp(input(group.rank(), 1)).square().sum().backward();
        }
        if (group.rank() == 0) expect_equal(gradients(*net), local);
        ddp(input(group.rank(), 2)).square().sum().backward();
        expect_equal(gradients(*net), expected);
      }
      EXPECT_EQ(ddp.statistics().iterations, 3);
    });
  }
}

TEST_P(Ddp, ForwardWithoutGradientsBetweenSteps) {
  run_group(2, [&](ProcessGroup group) {
    auto net = filled<Net>(1);
    DistributedDataParallel ddp(net, group);
    for (int step = 0; step < 3; ++step) {
      ddp(input(group.rank(), step)).sum().backward();
      const c10::AutoGradMode no_grad(false);
      EXPECT_FALSE(ddp(input(group.rank(), step)).requires_grad());
    }
  });
}

TEST_P(Ddp, TrainsTheSameWithAndWithoutViews) {
  std::vector<std::vector<at::Tensor>> ends(2);
  for (const bool view : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      DdpOptions options;
      options.gradient_as_bucket_view = view;
      auto net = filled<Net>(2);
      DistributedDataParallel ddp(net, group, options);
      auto sgd = make_optimizer("sgd", net->parameters(), {.lr = 0.1, .momentum = 0.9});
      for (int step = 0; step < 6; ++step) {
        zero_grad(net->parameters());
        ddp(input(group.rank(), step)).square().mean().backward();
        sgd->step();
      }
      // All ranks have the same weights.
      for (const at::Tensor& parameter : net->parameters()) {
        at::Tensor sent = parameter.detach().clone();
        group.broadcast(sent, 0);
        EXPECT_TRUE(at::equal(sent, parameter));
      }
      if (group.rank() == 0) ends[view ? 1 : 0] = net->parameters();
    });
  }
  expect_equal(ends[0], ends[1]);
}

TEST_P(Ddp, GradientsAreViewsOfTheBucketsUnlessTold) {
  for (const bool view : {true, false}) {
    run_group(2, [&](ProcessGroup group) {
      DdpOptions options;
      options.gradient_as_bucket_view = view;
      auto net = filled<Net>(2);
      DistributedDataParallel ddp(net, group, options);
      ddp(input(0)).sum().backward();
      EXPECT_EQ(net->first->weight.grad().is_alias_of(net->second->weight.grad()), view);
    });
  }
}

TEST_P(Ddp, FrozenParametersAreBroadcastButGetNoGradient) {
  run_group(2, [&](ProcessGroup group) {
    auto net = filled<Net>(group.rank());
    net->first->weight.set_requires_grad(false);
    DistributedDataParallel ddp(net, group);
    EXPECT_TRUE(at::equal(net->first->weight, filled<Net>(0)->first->weight));
    ddp(input(group.rank())).sum().backward();
    EXPECT_FALSE(net->first->weight.grad().defined());
    EXPECT_TRUE(net->first->bias.grad().defined());
    EXPECT_EQ(ddp.statistics().parameters, 5 + 15 + 3);
  });
}

TEST_P(Ddp, TiedParametersCountOnce) {
  const auto expected = averaged<Tied>(2, 1, [](Tied& net, int rank) {
    net.forward(values({3, 4}, rank)).sum().backward();
  });
  run_group(2, [&](ProcessGroup group) {
    auto net = filled<Tied>(1);
    fill(*net, 1);
    DistributedDataParallel ddp(net, group);
    ddp(values({3, 4}, group.rank())).sum().backward();
    EXPECT_EQ(ddp.statistics().parameters, 16);
    EXPECT_TRUE(at::equal(net->weight.grad(), expected[0]));
  });
}

TEST_P(Ddp, SparseGradientsAreAveraged) {
  run_group(2, [&](ProcessGroup group) {
    auto net = filled<Lookup>(1);
    DistributedDataParallel ddp(net, group);
    for (int step = 0; step < 2; ++step) {
      zero_grad(net->parameters());
      ddp(at::tensor({group.rank(), 5}, at::kLong)).backward();
      const at::Tensor gradient = net->table->weight.grad();
      ASSERT_TRUE(gradient.is_sparse());
      const at::Tensor dense = gradient.to_dense(), row = net->linear->weight[0].detach();
      EXPECT_TRUE(at::allclose(dense[0], row / 2));
      EXPECT_TRUE(at::allclose(dense[1], row / 2));
      EXPECT_TRUE(at::allclose(dense[5], row));
      EXPECT_EQ(dense[3].abs().sum().item<float>(), 0);
    }
  });
}

TEST_P(Ddp, InputsAndOutputsOfAnyType) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.find_unused_parameters = true;
    auto net = filled<Rich>(1);
    DistributedDataParallel ddp(net, group, options);
    for (int step = 0; step < 3; ++step) {
      zero_grad(net->parameters());
      auto answer = ddp(std::make_tuple(input(group.rank()), input(1)), 2.0);
      EXPECT_EQ(answer.count, 7);
      EXPECT_TRUE(at::equal(answer.extra.at("constant"), at::ones({2})));
      // One of the outputs is not used: its parameters still take part.
      answer.logits.sum().backward();
      EXPECT_TRUE(net->a->weight.grad().defined());
      EXPECT_FALSE(net->b->weight.grad().defined());
    }
  });
}

TEST_P(Ddp, IgnoredTensorsStayLocal) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.ignored = {"second.bias"};
    auto net = filled<Net>(group.rank());
    const at::Tensor before = net->second->bias.detach().clone();
    DistributedDataParallel ddp(net, group, options);
    EXPECT_TRUE(at::equal(net->second->bias, before));
    ddp(input(0)).mul(group.rank() + 1.0).sum().backward();
    EXPECT_EQ(net->second->bias.grad()[0].item<float>(), 4 * (group.rank() + 1));
    options.ignored = {"secnd.bias"};
    EXPECT_THROW(DistributedDataParallel(net, group, options), UsageError);
  });
}

TEST_P(Ddp, StatisticsShowTheBuckets) {
  run_group(2, [&](ProcessGroup group) {
    DdpOptions options;
    options.bucket_cap_mb = 50.0 / (1024 * 1024);
    options.first_bucket_mb = 1;
    auto net = filled<Net>(1);
    DistributedDataParallel ddp(net, group, options);
    DdpStatistics before = ddp.statistics();
    EXPECT_EQ(before.iterations, 0);
    EXPECT_EQ(before.parameters, 30 + 5 + 15 + 3);
    EXPECT_FALSE(before.buckets_rebuilt);
    // One bucket for the first step; then of about 50 bytes, by the order of gradients.
    EXPECT_EQ(before.bucket_bytes, (std::vector<int64_t>{53 * 4}));
    for (int step = 0; step < 2; ++step) ddp(input(0)).sum().backward();
    const DdpStatistics after = ddp.statistics();
    EXPECT_EQ(after.iterations, 2);
    EXPECT_TRUE(after.buckets_rebuilt);
    EXPECT_GT(after.bucket_bytes.size(), 1u);
    int64_t total = 0;
    for (const int64_t bytes : after.bucket_bytes) total += bytes;
    EXPECT_EQ(total, 53 * 4);
  });
}

TEST_P(Ddp, AForgottenForwardOfTheWrapperIsTold) {
  for (const bool find_unused : {false, true}) {
    run_group(2, [&](ProcessGroup group) {
      auto net = filled<Net>(1);
      DdpOptions options;
      options.find_unused_parameters = find_unused;
      DistributedDataParallel ddp(net, group, options);
      ddp.eval();
      EXPECT_FALSE(net->is_training());
      {
        const c10::AutoGradMode no_grad(false);
        ddp(input(0));
      }
      ddp.train();
      EXPECT_TRUE(net->is_training());
      try {
        net->forward(input(0)).sum().backward();
        ADD_FAILURE() << "nothing was said";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(),
                    ::testing::AllOf(::testing::HasSubstr("rank " + std::to_string(group.rank())),
                                     ::testing::HasSubstr("second.bias"),
                                     ::testing::HasSubstr("call ddp.forward")));
      }
      const auto plain = [&] {
        zero_grad(ddp.parameters());
        net->forward(input(group.rank())).sum().backward();
        const at::Tensor before = net->first->weight.grad().clone();
        at::Tensor mean = before.clone();
        group.all_reduce(mean, ReduceOp::avg);
        EXPECT_FALSE(at::equal(mean, before)) << "a plain pass is not averaged";
      };
      zero_grad(ddp.parameters());
      {
        const auto guard = ddp.no_sync();
        ddp(input(group.rank())).sum().backward();
      }
      plain();
      ddp(input(group.rank())).sum().backward();
      plain();
    });
  }
}

TEST_P(Ddp, OneRankNeedsNoReducer) {
  const auto expected = averaged<Net>(
      1, 1, [](Net& net, int rank) { net.forward(input(rank)).square().sum().backward(); });
  run_group(1, [&](ProcessGroup group) {
    auto net = filled<Net>(1);
    DistributedDataParallel ddp(net, group);
    ddp(input(0)).square().sum().backward();
    expect_equal(gradients(*net), expected);
    EXPECT_EQ(ddp.statistics().iterations, 1);
    EXPECT_TRUE(ddp.statistics().bucket_bytes.empty());
    const auto guard = ddp.no_sync();
    ddp(input(0)).sum().backward();
    EXPECT_EQ(ddp.statistics().iterations, 1);
  });
}

}  // namespace ddp_test_cases
}  // namespace lockstep
