// Data parallelism among some workers, whose losses go through others: gradients lie in the
// contexts of distributed autograd then.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <optional>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/launch/spawn.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/gradient_averager.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/message_of.h"

namespace lockstep::rpc {
namespace data_parallel_test {

/// On the server: a weight that the trainers' inputs are multiplied by.
struct Table {
  at::Tensor weight = at::full({2}, 2.0, at::kFloat).requires_grad_();
  at::Tensor forward(const at::Tensor& x) const { return x * weight; }
};
const auto make_table = function("data_parallel.table", [] { return std::make_shared<Table>(); });
const auto look_up = method("data_parallel.Table.forward", &Table::forward);

/// Runs `body` in two trainers. The third process is the worker "server".
void run_trainers(const std::function<void(const ProcessGroup& trainers)>& body) {
  spawn(
      [&](int rank) {
        const World world = init(InitOptions{});
        const auto role = world.group().split(rank < 2 ? 0 : 1);
        Agent agent =
            rpc::init(world, rank < 2 ? "trainer_" + std::to_string(rank) : std::string("server"));
        if (rank < 2) body(role);
        agent.shutdown();
        if (::testing::Test::HasFailure()) throw std::runtime_error("an expectation failed");
      },
      3);
}

/// Two layers, so that there are several buckets where these are small. All weights are ones.
struct Net : torch::nn::Module {
  Net() {
    register_module("first", first);
    register_module("second", second);
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(1);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x)); }
  torch::nn::Linear first{2, 3}, second{3, 1};
};

/// The trainer's own input. Its numbers are small and whole, so that sums are exact.
at::Tensor input(int rank, int step) {
  return at::full({4, 2}, static_cast<double>(1 + 2 * rank + step), at::kFloat);
}

std::vector<at::Tensor> expected_means(int step) {
  std::vector<at::Tensor> sums;
  for (const int rank : {0, 1}) {
    Net net;
    net.forward(Table().forward(input(rank, step)).detach()).sum().backward();
    for (size_t i = 0; i < net.parameters().size(); ++i) {
      if (rank == 0)
        sums.push_back(net.parameters()[i].grad());
      else
        sums[i] += net.parameters()[i].grad();
    }
  }
  for (auto& sum : sums) sum /= 2;
  return sums;
}

/// `forward` goes through what averages. Gradients are in the context alone, and their means.
void expect_means_in_contexts(Net& net, const std::function<at::Tensor(const at::Tensor&)>& forward,
                              const ProcessGroup& trainers) {
  const auto table = remote("server", make_table);
  std::vector<at::Tensor> before;
  for (int step = 0; step < 4; ++step) {
    AutogradContext context;
    const auto looked_up = table.rpc_sync(look_up, input(trainers.rank(), step));
    context.backward({forward(looked_up).sum()});
    const auto expected = expected_means(step);
    const auto parameters = net.parameters();
    std::vector<at::Tensor> means;
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_FALSE(parameters[i].grad().defined()) << i;
      means.push_back(context.gradient(parameters[i]));
      EXPECT_TRUE(at::equal(means.back(), expected[i])) << step << " " << i;
      // Those of a context stay what they are.
      EXPECT_FALSE(step > 0 && means.back().is_alias_of(before[i]));
    }
    before = means;
  }
}

TEST(RpcDataParallel, DdpAveragesTheGradientsOfAContext) {
  run_trainers([](const ProcessGroup& trainers) {
    for (const double bucket_mb : {25.0, 1e-6}) {
      auto net = std::make_shared<Net>();
      DistributedDataParallel ddp(net, trainers,
                                  {.bucket_cap_mb = bucket_mb, .first_bucket_mb = bucket_mb});
      expect_means_in_contexts(
          *net, [&](const at::Tensor& x) { return ddp.forward(x); }, trainers);
    }
  });
}

TEST(RpcDataParallel, AGradientAveragerDoesSoToo) {
  run_trainers([](const ProcessGroup& trainers) {
    Net net;
    const GradientAverager averager(net, trainers);
    expect_means_in_contexts(
        net, [&](const at::Tensor& x) { return net.forward(x); }, trainers);
  });
}

TEST(RpcDataParallel, ContextsAndPlainPassesMayTakeTurns) {
  run_trainers([](const ProcessGroup& trainers) {
    auto net = std::make_shared<Net>();
    DistributedDataParallel ddp(net, trainers);
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const at::Tensor x = Table().forward(input(trainers.rank(), step)).detach();
      AutogradContext context;
      const at::Tensor loss = ddp.forward(x).sum();
      step % 2 == 0 ? context.backward({loss}) : loss.backward();
      const auto expected = expected_means(step);
      for (size_t i = 0; i < expected.size(); ++i) {
        const at::Tensor parameter = net->parameters()[i];
        EXPECT_TRUE(
            at::equal(step % 2 == 0 ? context.gradient(parameter) : parameter.grad(), expected[i]));
      }
    }
  });
}

// The context's gradients pass through the buckets, of which grad() is a view.
TEST(RpcDataParallel, AContextLeavesPlainGradientsAlone) {
  run_trainers([](const ProcessGroup& trainers) {
    for (const bool views : {true, false}) {
      auto net = std::make_shared<Net>();
      DistributedDataParallel ddp(net, trainers, {.gradient_as_bucket_view = views});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        ddp.forward(input(trainers.rank(), step)).sum().backward();
        std::vector<at::Tensor> plain;
        for (const auto& parameter : net->parameters()) plain.push_back(parameter.grad().clone());
        AutogradContext context;
        context.backward({ddp.forward(5 * input(trainers.rank(), step)).sum()});
        for (size_t i = 0; i < plain.size(); ++i) {
          const at::Tensor parameter = net->parameters()[i];
          EXPECT_TRUE(at::equal(parameter.grad(), plain[i])) << step << " " << i;
          EXPECT_FALSE(i == 0 && at::equal(context.gradient(parameter), plain[i]));
        }
      }
    }
  });
}

/// Several layers beside each other. Of half of them the gradient comes from the server, while the
/// others' is computed here.
struct Branches : torch::nn::Module {
  static constexpr int kCount = 8;
  Branches() {
    for (int i = 0; i < 2 * kCount; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(2, 2)));
    }
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(1);
  }
  at::Tensor forward(const at::Tensor& x, const std::function<at::Tensor(at::Tensor)>& there) {
    at::Tensor sum = at::zeros({4, 2});
    for (int i = 0; i < kCount; ++i) {
      const auto at = static_cast<size_t>(2 * i);
      sum = sum + there(layers[at](x)) + layers[at + 1](x);
    }
    return sum;
  }
  std::vector<torch::nn::Linear> layers;
};

TEST(RpcDataParallel, GradientsMayComeFromOthersAndFromHereAtOnce) {
  run_trainers([](const ProcessGroup& trainers) {
    const auto table = remote("server", make_table);
    const auto plain_table = Table().weight.detach();
    for (const bool wrapped : {true, false}) {
      const auto net = std::make_shared<Branches>();
      std::optional<DistributedDataParallel<std::shared_ptr<Branches>>> ddp;
      std::optional<GradientAverager> averager;
      const DdpOptions small{.bucket_cap_mb = 1e-5, .first_bucket_mb = 1e-5};
      if (wrapped) {
        ddp.emplace(net, trainers, small);
      } else {
        averager.emplace(*net, trainers);
      }
      const auto there = [&](const at::Tensor& x) { return table.rpc_sync(look_up, x); };
      for (int step = 0; step < 10; ++step) {
        AutogradContext context;
        const at::Tensor x = input(trainers.rank(), step);
        context.backward({(wrapped ? ddp->forward(x, there) : net->forward(x, there)).sum()});
        Branches plain;
        const at::Tensor mean = (input(0, step) + input(1, step)) / 2;
        plain.forward(mean, [&](const at::Tensor& y) { return y * plain_table; }).sum().backward();
        for (size_t i = 0; i < plain.parameters().size(); ++i) {
          EXPECT_TRUE(
              at::equal(context.gradient(net->parameters()[i]), plain.parameters()[i].grad()))
              << step << " " << i;
        }
      }
    }
  });
}

// As distributed autograd does where gradients come from other workers.
TEST(RpcDataParallel, GradientsMayComeOnSeveralThreadsAtOnce) {
  run_trainers([](const ProcessGroup& trainers) {
    for (const bool wrapped : {true, false}) {
      const auto net = std::make_shared<Branches>();
      std::optional<DistributedDataParallel<std::shared_ptr<Branches>>> ddp;
      std::optional<GradientAverager> averager;
      if (wrapped) {
        ddp.emplace(net, trainers);
      } else {
        averager.emplace(*net, trainers);
      }
      const at::Tensor mean = at::full({1}, 6.0, at::kFloat);  // Of four rows of ones and twos.
      for (int step = 0; step < 300; ++step) {
        net->zero_grad();
        const at::Tensor x = at::full({4, 2}, 1.0 + trainers.rank(), at::kFloat);
        if (wrapped) ddp->forward(x, [](const at::Tensor& y) { return y; });
        std::atomic<int> ready{0};
        const auto backward = [&](size_t first) {
          std::vector<at::Tensor> losses;
          for (size_t i = first; i < net->layers.size(); i += 2)
            losses.push_back(net->layers[i](x).sum());
          const at::Tensor loss = at::stack(losses).sum();
          for (++ready; ready < 2;) std::this_thread::yield();
          loss.backward();
        };
        std::thread other([&] { backward(1); });
        backward(0);
        other.join();
        for (const auto& layer : net->layers)
          ASSERT_TRUE(layer->weight.grad().eq(mean).all().item<bool>()) << step;
      }
    }
  });
}

TEST(RpcDataParallel, GradientsOfTwoPlacesAreAnError) {
  run_trainers([](const ProcessGroup& trainers) {
    Net net;
    const GradientAverager averager(net, trainers);
    const at::Tensor x = input(trainers.rank(), 0);
    net.second(at::ones({4, 3})).sum().backward();
    AutogradContext context;
    const at::Tensor loss = net.first(x).sum();
    EXPECT_THAT(lockstep::test::message_of<Error>([&] { context.backward({loss}); }),
                ::testing::HasSubstr("came in another backward than those before it"));
  });
}

TEST(RpcDataParallel, WhatShardsGradientsRefusesAContext) {
  run_trainers([](const ProcessGroup& trainers) {
    FullyShardedDataParallel fsdp(std::make_shared<Net>(), trainers);
    AutogradContext context;
    const at::Tensor loss = fsdp.forward(input(trainers.rank(), 0)).sum();
    EXPECT_THAT(lockstep::test::message_of<Error>([&] { context.backward({loss}); }),
                ::testing::AllOf(::testing::HasSubstr("FullyShardedDataParallel, rank "),
                                 ::testing::HasSubstr("lie in an rpc::AutogradContext")));
  });
}

}  // namespace data_parallel_test
}  // namespace lockstep::rpc
