// Modules that need no memory until they are sharded.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <map>

#include "lockstep/base/error.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/sync_batch_norm/sync_batch_norm.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace deferred_init_test {

/// Draws random numbers in several ways, and shares memory between parameters.
struct Made : torch::nn::Module {
  Made() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
    const at::NoGradGuard no_grad;
    torch::nn::init::normal_(last->weight, 0, 0.02);
    last->bias.zero_();
    last->weight.narrow(0, 0, 2).mul_(3).add_(mask.sum());
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first{40, 30};
  torch::nn::BatchNorm1d norm{30};
  torch::nn::Linear last{30, 7};
  at::Tensor mask = register_buffer("mask", at::ones({3, 3}).tril().view({1, 3, 3}));
};

StateDict whole_state(const ProcessGroup& group, bool share) {
  const auto module = deferred_init([] { return std::make_shared<Made>(); });
  for (const at::Tensor& parameter : module->parameters()) EXPECT_TRUE(parameter.is_meta());
  FsdpOptions options;
  options.share_memory = share;
  options.units = {"first", "last"};
  FullyShardedDataParallel fsdp(module, group, options);
  for (const at::Tensor& parameter : module->parameters()) {
    EXPECT_TRUE(parameter.is_cpu());
    EXPECT_TRUE(parameter.requires_grad());
  }
  fsdp.forward(at::ones({4, 40})).square().sum().backward();
  for (const at::Tensor& shard : fsdp.parameters())
    EXPECT_TRUE(shard.numel() == 0 || shard.grad().defined());
  StateDict state;
  for (const auto& [name, tensor] : fsdp.full_state_dict())
    state.emplace_back(name, tensor.clone());
  return state;
}

TEST(DeferredInit, HasTheBitsOfTheModuleMadeAtOnce) {
  for (const bool share : {true, false}) {
    at::manual_seed(4);
    Made made;
    at::manual_seed(4);
    StateDict state;
    test::run_group(1, [&](ProcessGroup group) { state = whole_state(group, share); });
    std::map<std::string, at::Tensor> by_name(state.begin(), state.end());
    for (const auto& item : made.named_parameters())
      EXPECT_TRUE(at::equal(by_name.at(item.key()), item.value())) << item.key();
    EXPECT_TRUE(at::equal(by_name.at("mask"), made.mask));
    EXPECT_EQ(by_name.size(), made.named_parameters().size() + made.named_buffers().size());
  }
}

TEST(DeferredInit, AllRanksHaveRankZerosValues) {
  for (const bool share : {true, false}) {
    test::run_group(3,
                    [&](ProcessGroup group) {
                      // Threads draw from one generator, so each has other values; rank 0's
                      // count.
                      const StateDict state = whole_state(group, share);
                      if (group.rank() == 0) {
                        EXPECT_GT(state[0].second.abs().sum().item<float>(), 0);
                        EXPECT_FALSE(at::isnan(state[0].second).any().item<bool>());
                      }
                    },
                    {.backend = "shm"});
  }
}

TEST(DeferredInit, ShardsOfAllRanksAreOfRankZerosValues) {
  for (const bool share : {true, false}) {
    test::run_group(3,
                    [&](ProcessGroup group) {
                      const auto module = deferred_init([&] {
                        auto made = std::make_shared<Made>();
                        const at::NoGradGuard no_grad;
                        made->first->weight.fill_(group.rank() + 5);
                        return made;
                      });
                      FsdpOptions options;
                      options.share_memory = share;
                      FullyShardedDataParallel fsdp(module, group, options);
                      for (const auto& [name, tensor] : fsdp.full_state_dict()) {
                        if (name == "first.weight") {
                          EXPECT_TRUE(tensor.eq(5).all().item<bool>());
                        }
                      }
                    },
                    {.backend = "shm"});
  }
}

/// Both change what LibTorch's dispatcher does, in one process.
TEST(DeferredInit, GoesWithSynchronisedBatchNorms) {
  test::run_group(2,
                  [](ProcessGroup group) {
                    const SyncBatchNormGuard guard(group);
                    const StateDict state = whole_state(group, true);
                    EXPECT_EQ(state.empty(), group.rank() != 0);
                  },
                  {.backend = "shm"});
}

TEST(DeferredInit, AMetaModuleOfWhichNothingIsKnownIsRefused) {
  test::run_group(1, [](ProcessGroup group) {
    struct Bare : torch::nn::Module {
      Bare() { register_parameter("weight", at::empty({4}, at::kMeta)); }
    };
    try {
      FullyShardedDataParallel fsdp(std::make_shared<Bare>(), group);
      ADD_FAILURE() << "accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("deferred_init"));
    }
  });
  EXPECT_THROW(deferred_init([] { return deferred_init([] { return std::make_shared<Made>(); }); }),
               UsageError);
  // The mode is over after it.
  EXPECT_FALSE(at::ones({1}).is_meta());
}

}  // namespace deferred_init_test
}  // namespace lockstep
