#include "lockstep/parallel/logical_shards.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>

#include <bit>
#include <map>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/shard_tree.h"
#include "lockstep/parallel/state_dict.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace logical_shards_test {

using ddp_test::fill;
using ddp_test::values;

using Numbers = std::vector<float>;
using NumberTree = detail::ShardTree<float>;

void add(float& left, float& right) {
  left += right;
}

/// The first half is the largest power of two below the number.
float tree_sum(const Numbers& numbers, size_t begin, size_t end) {
  if (end - begin == 1) return numbers[begin];
  const size_t half = begin + std::bit_floor(end - begin - 1);
  return tree_sum(numbers, begin, half) + tree_sum(numbers, half, end);
}

Numbers some_numbers(size_t count) {
  KeyedRandom random(count);
  Numbers numbers;
  for (size_t i = 0; i < count; ++i) numbers.push_back(static_cast<float>(random.normal()));
  return numbers;
}

TEST(ShardTree, IsTheSameWhoeverSumsTheParts) {
  for (size_t count = 1; count <= 40; ++count) {
    const Numbers numbers = some_numbers(count);
    for (int ranks = 1; ranks <= static_cast<int>(count); ++ranks) {
      NumberTree whole(add);
      for (int rank = 0; rank < ranks; ++rank) {
        NumberTree part(add);
        const ShardRange own = shards_of_rank(static_cast<int64_t>(count), rank, ranks);
        for (int64_t i = own.begin; i < own.end; ++i) part.push({i, 1, numbers[i]});
        for (const auto& node : part.nodes()) whole.push(node);
      }
      EXPECT_EQ(whole.take_total(), tree_sum(numbers, 0, count)) << count << " over " << ranks;
    }
  }
}

TEST(ShardTree, RangesOfRanksAreNeighboursOfEqualSize) {
  for (int64_t shards = 1; shards <= 20; ++shards) {
    for (int ranks = 1; ranks <= shards; ++ranks) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ShardRange own = shards_of_rank(shards, rank, ranks);
        EXPECT_EQ(own.begin, next);
        EXPECT_GE(own.size(), shards / ranks);
        EXPECT_LE(own.size(), (shards + ranks - 1) / ranks);
        next = own.end;
      }
      EXPECT_EQ(next, shards);
    }
  }
  EXPECT_THROW(shards_of_rank(2, 0, 3), UsageError);
}

/// With batch norm, and a buffer that nothing changes.
struct Norm : torch::nn::Module {
  Norm() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
    register_buffer("mask", at::full({3}, -std::numeric_limits<float>::infinity()));
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::relu(norm(first(x)))); }
  torch::nn::Linear first{6, 5};
  torch::nn::BatchNorm1d norm{5};
  torch::nn::Linear last{5, 3};
};

at::Tensor loss_of(Norm& net, int64_t step, int64_t shard, int64_t batch = 0) {
  const at::Tensor x = values({4, 6}, static_cast<double>(100 * step + 7 * shard + batch));
  return net.forward(x).square().mean();
}

/// Three steps of Adam with clipped gradients, the second of two batches a shard.
StateDict trained(const ProcessGroup& group, int64_t count) {
  Norm net;
  fill(net, group.rank());
  LogicalShards shards(net, group, count, 1);
  const auto optimizer = make_optimizer("adam", net.parameters(), {.lr = 0.01});
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t shard = shards.own().begin; shard < shards.own().end; ++shard) {
      if (step == 1)
        shards.run(
            step, shard, [&] { return loss_of(net, step, shard, 1); }, false);
      shards.run(step, shard, [&] { return loss_of(net, step, shard); });
    }
    clip_grad_norm(net.parameters(), 0.1);
    optimizer->step();
  }
  StateDict state;
  for (const auto& [name, tensor] : state_dict(net))
    state.emplace_back(name, tensor.detach().clone());
  return state;
}

void expect_equal(const StateDict& found, const StateDict& wanted, const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::equal(found[i].second, wanted[i].second)) << what << ": " << found[i].first;
}

class LogicalShardsOver : public test::OverBackends {};

TEST_P(LogicalShardsOver, GiveTheSameBitsAtAnySize) {
  for (const int64_t count : {3, 4, 7}) {
    StateDict alone;
    test::run_group(1, [&](ProcessGroup group) { alone = trained(group, count); });
    for (int ranks = 2; ranks <= 4 && ranks <= count; ++ranks) {
      run_group(ranks, [&](ProcessGroup group) {
        expect_equal(trained(group, count), alone,
                     std::to_string(count) + " shards on " + std::to_string(ranks) + " ranks");
      });
    }
  }
}

TEST_P(LogicalShardsOver, SumNumbersByTheTree) {
  const Numbers numbers = some_numbers(7);
  std::vector<double> wide(numbers.begin(), numbers.end());
  detail::ShardTree<double> tree([](double& left, double& right) { left += right; });
  for (size_t i = 0; i < wide.size(); ++i) tree.push({static_cast<int64_t>(i), 1, wide[i] / 3});
  const double wanted = tree.take_total();
  run_group(3, [&](ProcessGroup group) {
    Norm net;
    const LogicalShards shards(net, group, 7, 0);
    std::vector<double> own;
    for (int64_t i = shards.own().begin; i < shards.own().end; ++i) own.push_back(wide[i] / 3);
    EXPECT_EQ(shards.sum(own), wanted);
    own.push_back(0);
    EXPECT_THROW(shards.sum(own), UsageError);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LogicalShardsOver, test::over_backends(), test::backend_name);

void expect_gradients(Norm& net, const std::vector<at::Tensor>& wanted) {
  const auto parameters = net.parameters();
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(at::equal(parameters[i].grad(), wanted[i])) << i;
}

TEST(LogicalShards, BeginAStepAnewAfterAnException) {
  test::run_group(1, [](ProcessGroup group) {
    Norm net;
    fill(net, 0);
    LogicalShards shards(net, group, 2, 0);
    const auto run = [&](int64_t shard) {
      shards.run(0, shard, [&] { return loss_of(net, 0, shard); });
    };
    const StateDict before = [&] {
      StateDict state;
      for (const auto& [name, tensor] : state_dict(net))
        state.emplace_back(name, tensor.detach().clone());
      return state;
    }();
    run(0);
    run(1);
    std::vector<at::Tensor> wanted;
    for (const at::Tensor& parameter : net.parameters()) wanted.push_back(parameter.grad().clone());
    load_state_dict(net, before, "test");
    run(0);
    EXPECT_THROW(shards.run(0, 1, []() -> at::Tensor { throw DataError("no batch"); }), DataError);
    load_state_dict(net, before, "test");
    run(0);
    run(1);
    expect_gradients(net, wanted);
  });
}

TEST(LogicalShards, RefuseWhatWouldTrainSomethingElse) {
  test::run_group(1, [](ProcessGroup group) {
    Norm net;
    EXPECT_THROW(LogicalShards(net, group, 0, 0), UsageError);
    LogicalShards shards(net, group, 3, 0);
    const auto run = [&](int64_t shard) {
      shards.run(0, shard, [&] { return loss_of(net, 0, shard); });
    };
    EXPECT_THROW(run(1), UsageError);
    run(0);
    EXPECT_THROW(run(2), UsageError);
    run(0);
    // A parameter that a shard does not use.
    EXPECT_THROW(shards.run(0, 1, [&] { return net.first(values({4, 6}, 0)).sum(); }), UsageError);
  });
}

}  // namespace logical_shards_test
}  // namespace lockstep
