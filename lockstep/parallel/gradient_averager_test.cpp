#include "lockstep/parallel/gradient_averager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <stdexcept>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/message_of.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace gradient_averager_test {

using ddp_test::Counter;
using ddp_test::fill;
using ddp_test::Heads;
using ddp_test::Lookup;
using ddp_test::Net;
using ddp_test::values;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Tensors = std::vector<at::Tensor>;
using test::message_of;

at::Tensor input(int rank, int step = 0) {
  return values({4, 6}, 10 * rank + step);
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

Tensors copies(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) all.push_back(tensor.detach().clone());
  return all;
}

void expect_the_same_on_all_ranks(const Tensors& tensors, const ProcessGroup& group) {
  for (const at::Tensor& tensor : tensors) {
    at::Tensor sent = tensor.detach().clone();
    group.broadcast(sent, 0);
    EXPECT_TRUE(at::equal(sent, tensor));
  }
}

/// Six steps of torch::optim's SGD, with a backward of two forwards in each second one.
template <class Forward>
Tensors train(Net& net, int rank, bool engine, Forward forward) {
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    at::Tensor loss = forward(input(rank, step)).square().mean();
    if (step % 2 == 1) loss = loss + forward(input(rank, step + 7)).abs().mean();
    sgd.zero_grad();
    engine ? loss.backward() : backward(loss);
    sgd.step();
  }
  return copies(net.parameters());
}

class Averager : public test::OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Averager, test::over_backends(), test::backend_name);

TEST_P(Averager, TiedParametersCountOnce) {
  run_group(2, [](const ProcessGroup& group) {
    ddp_test::Tied net;
    fill(net, 1);
    GradientAverager averager(net.parameters(), group);
    net.forward(values({3, 4}, group.rank())).sum().backward();
    ddp_test::Tied alone;
    fill(alone, 1);
    for (int rank = 0; rank < 2; ++rank) alone.forward(values({3, 4}, rank)).sum().backward();
    EXPECT_TRUE(at::allclose(net.weight.grad(), alone.weight.grad() / 2));
  });
}

TEST_P(Averager, TrainsToDdpsBits) {
  for (const int ranks : {2, 3}) {
    for (const bool view : {true, false}) {
      run_group(ranks, [&](ProcessGroup group) {
        SCOPED_TRACE("views: " + std::to_string(view));
        DdpOptions options;
        options.gradient_as_bucket_view = view;
        options.bucket_cap_mb = 50.0 / (1024 * 1024);
        auto wrapped = std::make_shared<Net>();
        fill(*wrapped, 1);
        DistributedDataParallel ddp(wrapped, group, options);
        // One forward per backward is what DDP can do: the two are one call here.
        const Tensors expected =
            train(*wrapped, group.rank(), true, [&, forwards = 0](const at::Tensor& x) mutable {
              const bool second = forwards == 2 || forwards == 5 || forwards == 8;
              ++forwards;
              return second ? wrapped->forward(x) : ddp(x);
            });

        // Each from the start: three ranks' sums depend on where a gradient lies in the buckets.
        for (const bool engine : {true, false}) {
          Net net;
          fill(net, 1 + 5 * group.rank());  // Only rank 0's parameters count.
          GradientAverager averager(
              net, group,
              {.bucket_cap_mb = options.bucket_cap_mb, .gradient_as_bucket_view = view});
          expect_equal(
              train(net, group.rank(), engine, [&](const at::Tensor& x) { return net.forward(x); }),
              expected);
          EXPECT_EQ(averager.statistics().iterations, 6);
          EXPECT_EQ(averager.statistics().parameters, 53);
          EXPECT_TRUE(averager.statistics().buckets_rebuilt);
          EXPECT_EQ(averager.statistics().bucket_bytes, ddp.statistics().bucket_bytes);
        }
      });
    }
  }
}

TEST_P(Averager, AGanWithTwoOptimizersStaysTheSameOnAllRanks) {
  run_group(2, [&](ProcessGroup group) {
    torch::nn::Linear generator(3, 6), discriminator(6, 1);
    fill(*generator, 2 + group.rank());
    fill(*discriminator, 3 + group.rank());
    GradientAverager of_generator(*generator, group), of_discriminator(*discriminator, group);
    torch::optim::SGD g(generator->parameters(), 0.1), d(discriminator->parameters(), 0.1);
    // What one process gets that sees both ranks' data.
    torch::nn::Linear whole_generator(3, 6), whole_discriminator(6, 1);
    fill(*whole_generator, 2);
    fill(*whole_discriminator, 3);
    torch::optim::SGD wg(whole_generator->parameters(), 0.1),
        wd(whole_discriminator->parameters(), 0.1);
    const auto noise = [](int rank, int step) { return values({4, 3}, 5 * rank + step); };
    for (int step = 0; step < 4; ++step) {
      const int rank = group.rank();
      discriminator->zero_grad();
      discriminator(input(rank, step)).sigmoid().log().neg().mean().backward();
      const at::Tensor fake = generator(noise(rank, step));
      discriminator(fake.detach()).sigmoid().mean().backward();
      d.step();
      generator->zero_grad();
      discriminator(fake).sigmoid().log().neg().mean().backward();
      g.step();

      whole_discriminator->zero_grad();
      const at::Tensor all_noise = at::cat({noise(0, step), noise(1, step)});
      whole_discriminator(at::cat({input(0, step), input(1, step)}))
          .sigmoid()
          .log()
          .neg()
          .mean()
          .backward();
      const at::Tensor all_fake = whole_generator(all_noise);
      whole_discriminator(all_fake.detach()).sigmoid().mean().backward();
      wd.step();
      whole_generator->zero_grad();
      whole_discriminator(all_fake).sigmoid().log().neg().mean().backward();
      wg.step();
    }
    for (const auto& [mine, whole] :
         {std::pair(generator->parameters(), whole_generator->parameters()),
          std::pair(discriminator->parameters(), whole_discriminator->parameters())}) {
      expect_the_same_on_all_ranks(mine, group);
      // The mean of two halves' means is rounded in another order than the whole's.
      for (size_t i = 0; i < mine.size(); ++i)
        EXPECT_TRUE(at::allclose(mine[i], whole[i], 1e-5, 1e-6));
    }
  });
}

TEST_P(Averager, GoesOnAfterABackwardThatThrew) {
  // A bucket for all, and one for each, of which some are under way when backward throws.
  const auto body = [&](const ProcessGroup& group, double bucket_mb) {
    torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::Linear(4, 1));
    GradientAverager averager(*net, group,
                              {.bucket_cap_mb = bucket_mb, .first_bucket_mb = bucket_mb});
    const auto step = [&](bool throws) {
      zero_grad(net->parameters());
      const at::Tensor h = net[0]->as<torch::nn::Linear>()->forward(at::ones({2, 6}));
      h.register_hook([throws](const at::Tensor&) {
        if (throws) throw std::runtime_error("a bad batch");
      });
      const at::Tensor y = net[1]->as<torch::nn::Linear>()->forward(h);
      return message_of([&] { (y * (group.rank() + 1)).sum().backward(); });
    };
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(step(false), "no error");
      EXPECT_THAT(step(true), HasSubstr("a bad batch"));
      EXPECT_THAT(step(false), AllOf(HasSubstr("gave none yet to: 0."), HasSubstr("comes once")));
      for (int again = 0; again < 2; ++again) {
        EXPECT_EQ(step(false), "no error");
        EXPECT_EQ(net->parameters().back().grad().item<double>(), 3) << "2 rows times the mean";
      }
    }
  };
  for (const double bucket_mb : {25.0, 1e-5}) {
    run_group(2, [&](ProcessGroup group) { body(group, bucket_mb); });
  }
}

TEST_P(Averager, NoSyncAddsUpAndTheNextBackwardAveragesTheSum) {
  run_group(2, [&](ProcessGroup group) {
    const auto sum_of = [](Net& net, int rank) {
      net.forward(input(rank, 1)).square().sum().backward();
      net.forward(input(rank, 2)).square().sum().backward();
    };
    Tensors expected(4);
    for (int rank = 0; rank < 2; ++rank) {
      Net net;
      fill(net, 1);
      sum_of(net, rank);
      for (size_t i = 0; i < 4; ++i) {
        const at::Tensor part = net.parameters()[i].grad() / 2;
        expected[i] = rank == 0 ? part : expected[i] + part;
      }
    }
    Net net;
    fill(net, 1);
    GradientAverager averager(net.parameters(), group);
    for (int round = 0; round < 3; ++round) {
      net.zero_grad();
      {
        const auto guard = averager.no_sync();
        net.forward(input(group.rank(), 1)).square().sum().backward();
      }
      net.forward(input(group.rank(), 2)).square().sum().backward();
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_TRUE(at::equal(net.parameters()[i].grad(), expected[i]));
      }
    }
    EXPECT_EQ(averager.statistics().iterations, 3);
  });
}

TEST_P(Averager, APartOfTheParametersPerBackwardIsAveragedWhenAllHaveCome) {
  run_group(2, [&](ProcessGroup group) {
    Heads net;
    fill(net, 1);
    GradientAverager averager(net, group);
    const auto [left, right] = net.forward(input(group.rank()));
    left.sum().backward({}, /*retain_graph=*/true);
    EXPECT_THAT(message_of([&] { left.sum().backward(); }),
                AllOf(HasSubstr("rank " + std::to_string(group.rank())), HasSubstr("right.weight"),
                      HasSubstr("find_unused_parameters"), Not(HasSubstr("left.weight,"))));
  });
  run_group(2, [&](ProcessGroup group) {
    Heads net;
    fill(net, 1);
    GradientAverager averager(
        Tensors{net.left->weight, net.left->bias, net.right->weight, net.right->bias}, group);
    for (int step = 0; step < 3; ++step) {
      net.zero_grad();
      const auto [left, right] = net.forward(input(group.rank(), step));
      left.sum().backward({}, /*retain_graph=*/true);
      right.sum().backward();
      expect_the_same_on_all_ranks({net.left->weight.grad(), net.right->weight.grad()}, group);
    }
    EXPECT_EQ(averager.statistics().iterations, 3);
  });
}

TEST_P(Averager, BuffersAreSharedAtStartAndWhenAsked) {
  run_group(2, [&](ProcessGroup group) {
    Counter net;
    net.seen.fill_(group.rank() + 3);
    GradientAverager averager(net, group);
    EXPECT_EQ(net.seen[1].item<float>(), 3);
    net.seen.fill_(group.rank() + 5);
    net.forward(input(0)).sum().backward();
    EXPECT_EQ(net.seen[0].item<float>(), group.rank() + 5);
    averager.sync_buffers();
    EXPECT_EQ(net.seen[0].item<float>(), 5);
    GradientAverager of_parameters(net.parameters(), group);
    EXPECT_THAT(message_of([&] { of_parameters.sync_buffers(); }), HasSubstr("given parameters"));
  });
}

TEST_P(Averager, SparseGradientsOfAModuleAreAveraged) {
  run_group(2, [&](ProcessGroup group) {
    Lookup net;
    fill(net, 1);
    GradientAverager averager(net, group);
    for (int step = 0; step < 2; ++step) {
      net.zero_grad();
      net.forward(at::tensor({group.rank(), 5}, at::kLong)).backward();
      const at::Tensor dense = net.table->weight.grad().to_dense();
      const at::Tensor row = net.linear->weight[0].detach();
      EXPECT_TRUE(at::allclose(dense[0], row / 2));
      EXPECT_TRUE(at::allclose(dense[1], row / 2));
      EXPECT_TRUE(at::allclose(dense[5], row));
    }
  });
}

TEST_P(Averager, HooksGiveDdpsBits) {
  for (const CommHook hook : {CommHook::allreduce, CommHook::bf16_compress}) {
    run_group(2, [&](ProcessGroup group) {
      auto wrapped = std::make_shared<Net>();
      fill(*wrapped, 1);
      DdpOptions options;
      options.comm_hook = hook;
      DistributedDataParallel ddp(wrapped, group, options);
      Net net;
      fill(net, 1);
      GradientAverager averager(net, group, {.comm_hook = hook});
      for (int step = 0; step < 3; ++step) {
        wrapped->zero_grad();
        net.zero_grad();
        ddp(input(group.rank(), step)).square().sum().backward();
        net.forward(input(group.rank(), step)).square().sum().backward();
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_TRUE(at::equal(net.parameters()[i].grad(), wrapped->parameters()[i].grad()));
        }
      }
    });
  }
}

TEST_P(Averager, LeavesTheValuesAloneWhereItIsTold) {
  run_group(2, [&](ProcessGroup group) {
    Net net;
    fill(net, group.rank());
    const Tensors before = copies(net.parameters());
    GradientAverager averager(net, group, {.init_sync = false});
    expect_equal(net.parameters(), before);
  });
}

TEST_P(Averager, ALostRankEndsBackwardWithACommError) {
  run_group(2, [&](ProcessGroup group) {
    Net net;
    fill(net, 1);
    GradientAverager averager(net, group);
    for (int step = 0; step < 3; ++step) net.forward(input(group.rank())).sum().backward();
    if (group.rank() == 1) return;
    group.set_timeout(std::chrono::milliseconds(500));
    EXPECT_THROW(net.forward(input(0)).sum().backward(), CommError);
  });
}

TEST_P(Averager, MovesWithItsHooks) {
  run_group(2, [&](ProcessGroup group) {
    Net net;
    fill(net, 1);
    GradientAverager first(net, group);
    GradientAverager averager = std::move(first);
    net.forward(input(group.rank())).sum().backward();
    expect_the_same_on_all_ranks({net.first->weight.grad()}, group);
    EXPECT_EQ(averager.statistics().iterations, 1);
    EXPECT_EQ(averager.group().rank(), group.rank());
  });
}

TEST_P(Averager, WrongUseIsNamed) {
  run_group(2, [&](ProcessGroup group) {
    torch::nn::Linear net(group.rank() + 1, 2);
    EXPECT_THROW(GradientAverager(*net, group), MismatchError);
    EXPECT_THROW(GradientAverager(net->parameters(), group), MismatchError);
    Net frozen;
    for (at::Tensor& parameter : frozen.parameters()) parameter.set_requires_grad(false);
    EXPECT_THAT(message_of([&] { GradientAverager(frozen, group); }),
                HasSubstr("needs a gradient"));
    EXPECT_THAT(message_of([&] { GradientAverager(Tensors{Net().first->weight + 1}, group); }),
                HasSubstr("parameter 0"));
    EXPECT_THAT(message_of([&] { GradientAverager(frozen, ProcessGroup()); }), HasSubstr("null"));
  });
  run_group(1, [&](ProcessGroup group) {
    Heads net;
    GradientAverager averager(net, group);
    for (int step = 0; step < 2; ++step) net.forward(input(0)).first.sum().backward();
    EXPECT_EQ(averager.statistics().iterations, 0);
  });
}

}  // namespace gradient_averager_test
}  // namespace lockstep
