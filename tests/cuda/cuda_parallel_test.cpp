#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "lockstep/autograd/backward.h"
#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/parallel/sync_batch_norm/sync_batch_norm.h"
#include "tests/cuda/cuda_testing.h"
#include "tests/support/ddp_test_modules.h"
#include "tests/support/zero_training.h"

namespace lockstep::cuda_test {
namespace {

using ddp_test::values;
using zero_test::Job;
using zero_test::Trained;

class CudaParallelTest : public Nccl {};

/// Big enough for several buckets.
struct Deep : torch::nn::Module {
  Deep() {
    for (int i = 0; i < 6; ++i)
      layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(64, 64)));
    ddp_test::fill(*this, 1);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

std::shared_ptr<Deep> deep() {
  auto net = std::make_shared<Deep>();
  net->to(kGpu);
  return net;
}

at::Tensor input_of(int rank, int step) {
  return values({8, 64}, 100 * rank + 10 * step).to(kGpu);
}

StateDict parameters_of(const torch::nn::Module& module) {
  return zero_test::tensors_of(module);
}

/// Trains by a wrapper, or by the module itself.
template <class Forward>
StateDict train_deep(Deep& net, int rank, Forward forward) {
  const auto optimizer = make_optimizer("adam", net.parameters(), {.lr = 0.01});
  for (int step = 0; step < 5; ++step) {
    forward(input_of(rank, step)).square().mean().backward();
    optimizer->step();
    zero_grad(net.parameters());
  }
  return parameters_of(net);
}

DdpOptions many_buckets() {
  DdpOptions options;
  options.bucket_cap_mb = 0.04;
  options.first_bucket_mb = 0.02;
  return options;
}

/// With a hook of the user's a group of one communicates, too.
DdpOptions reducing_over_nccl() {
  DdpOptions options = many_buckets();
  options.async_custom_hook = [](const ProcessGroup& group, GradientBucket& bucket) {
    at::Tensor gradients = bucket.gradients;
    const Work work = group.all_reduce_async(gradients);
    return [work, gradients] {
      work.wait();
      return gradients;
    };
  };
  return options;
}

TEST_F(CudaParallelTest, DdpOverNcclHasTheBitsOfOneProcess) {
  const World world = world_of_one();
  const auto plain = deep();
  const StateDict expected = train_deep(*plain, 0, [&](auto x) { return plain->forward(x); });
  for (const DdpOptions& options : {many_buckets(), reducing_over_nccl()}) {
    const auto net = deep();
    DistributedDataParallel ddp(net, world.group(), options);
    expect_same_state(train_deep(*net, 0, [&](auto x) { return ddp.forward(x); }), expected);
    EXPECT_EQ(ddp.statistics().bucket_bytes.size() > 2, bool(options.async_custom_hook));
  }
}

TEST_F(CudaParallelTest, HooksSendGradientsIn16Bits) {
  const World world = world_of_one();
  const auto plain = deep();
  plain->forward(input_of(0, 0)).square().mean().backward();
  for (const CommHook hook : {CommHook::fp16_compress, CommHook::bf16_compress}) {
    const auto net = deep();
    DdpOptions options = many_buckets();
    options.comm_hook = hook;
    DistributedDataParallel ddp(net, world.group(), options);
    ddp.forward(input_of(0, 0)).square().mean().backward();
    const auto dtype = hook == CommHook::fp16_compress ? at::kHalf : at::kBFloat16;
    for (size_t i = 0; i < net->parameters().size(); ++i)
      expect_equal(net->parameters()[i].grad(),
                   plain->parameters()[i].grad().to(dtype).to(at::kFloat));
  }
}

TEST_F(CudaParallelTest, NoSyncAddsUp) {
  const World world = world_of_one();
  const auto plain = deep(), net = deep();
  DistributedDataParallel ddp(net, world.group(), reducing_over_nccl());
  for (int i = 0; i < 3; ++i) plain->forward(input_of(0, i)).square().mean().backward();
  {
    const auto no_sync = ddp.no_sync();
    for (int i = 0; i < 2; ++i) ddp.forward(input_of(0, i)).square().mean().backward();
  }
  ddp.forward(input_of(0, 2)).square().mean().backward();
  for (size_t i = 0; i < net->parameters().size(); ++i)
    expect_equal(net->parameters()[i].grad(), plain->parameters()[i].grad());
}

Trained train_by(const std::string& strategy_name, const ProcessGroup& group, const Job& job,
                 const StrategyOptions& options = {}) {
  auto net = std::make_shared<zero_test::Net>();
  net->to(kGpu);
  StrategySetup setup = zero_test::setup_of(net, group, job);
  setup.device = kGpu;
  setup.options = options;
  const auto strategy = make_strategy(strategy_name, setup);
  Trained trained;
  for (int step = 0; step < job.steps; ++step) {
    const at::Tensor x = values({4, 75}, 100 * group.rank() + 10 * step).to(kGpu);
    BatchWork work;
    work.loss = [&] {
      const at::Tensor loss = net->forward(x).square().mean();
      trained.losses.push_back(loss.item<double>());
      return loss;
    };
    strategy->run_batch(work);
    if (job.max_norm > 0) trained.norms.push_back(strategy->clip_grad_norm(job.max_norm));
    strategy->step();
    strategy->zero_grad();
  }
  trained.model = zero_test::copied(strategy->model_state());
  trained.optimizer = zero_test::copied(strategy->optimizer_state());
  return trained;
}

class CudaStrategyTest : public Nccl, public ::testing::WithParamInterface<const char*> {};

TEST_P(CudaStrategyTest, HasTheBitsOfDdpOverNccl) {
  const World world = world_of_one();
  for (const char* optimizer : {"sgd", "adam", "adamw"}) {
    const Job job{.optimizer = optimizer};
    const Trained expected = train_by("ddp", world.group(), job);
    const Trained got = train_by(GetParam(), world.group(), job);
    EXPECT_EQ(got.losses, expected.losses) << optimizer;
    expect_same_state(got.model, expected.model);
    expect_same_state(got.optimizer, expected.optimizer);
  }
  const Job clipped{.max_norm = 0.01};
  EXPECT_NEAR(train_by(GetParam(), world.group(), clipped).norms.at(0),
              train_by("ddp", world.group(), clipped).norms.at(0), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(All, CudaStrategyTest, ::testing::Values("zero1", "zero2", "fsdp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(CudaParallelTest, FsdpShardsAModuleWhereItIs) {
  const World world = world_of_one();
  const auto plain = deep(), net = deep();
  const StateDict expected = train_deep(*plain, 0, [&](auto x) { return plain->forward(x); });
  FsdpOptions options;
  options.min_unit_elements = 1;
  FullyShardedDataParallel fsdp(net, world.group(), options);
  const auto optimizer = make_optimizer("adam", fsdp.parameters(), {.lr = 0.01});
  for (int step = 0; step < 5; ++step) {
    fsdp.forward(input_of(0, step)).square().mean().backward();
    optimizer->step();
    zero_grad(fsdp.parameters());
  }
  EXPECT_EQ(fsdp.parameters().front().device(), kGpu);
  EXPECT_GT(fsdp.statistics().gathers, 5);
  expect_same_state(fsdp.full_state_dict(), expected);
}

TEST_F(CudaParallelTest, FsdpKeepsShardsInTheHostsMemory) {
  const World world = world_of_one();
  const StrategyOptions offload{.fsdp = FsdpOptions{.cpu_offload = true}};
  const Job job;
  const Trained expected = train_by("fsdp", world.group(), job);
  const Trained got = train_by("fsdp", world.group(), job, offload);
  ASSERT_EQ(got.model.size(), expected.model.size());
  for (size_t i = 0; i < got.model.size(); ++i)
    EXPECT_TRUE(at::allclose(got.model[i].second.cpu(), expected.model[i].second.cpu(), 1e-5, 1e-6))
        << got.model[i].first;
}

/// What each of two ranks that share the device over Gloo checks. They are processes: one process
/// runs all backwards on a device on one thread, where they would wait for each other.
void check_as_rank(const ProcessGroup& group) {
  std::vector<at::Tensor> expected;
  for (int rank = 0; rank < 2; ++rank) {
    const auto net = deep();
    net->forward(input_of(rank, 0)).square().mean().backward();
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor half = parameters[i].grad() / 2;
      rank == 0 ? expected.push_back(half) : static_cast<void>(expected[i] += half);
    }
  }
  const auto net = deep();
  DistributedDataParallel ddp(net, group, many_buckets());
  ddp.forward(input_of(group.rank(), 0)).square().mean().backward();
  for (size_t i = 0; i < expected.size(); ++i)
    expect_equal(net->parameters()[i].grad(), expected[i], std::to_string(i));
}

class CudaRanksTest : public Cuda {};

TEST_F(CudaRanksTest, TwoProcessesShareTheDevice) {
  constexpr const char* kMeet = "CUDA_TEST_MEET";
  if (const char* meet = std::getenv(kMeet)) {
    InitOptions options;
    options.backend = "gloo";
    options.init_method = std::string("file://") + meet;
    const World world = init(options);
    return check_as_rank(world.group());
  }
  const std::string meet = testing::TempDir() + "lockstep_cuda_" + std::to_string(getpid());
  const auto outcomes = test::run_ranks(2, [&](int rank) {
    const std::string command = std::string(kMeet) + "=" + meet + " RANK=" + std::to_string(rank) +
                                " WORLD_SIZE=2 timeout 120 " +
                                std::filesystem::read_symlink("/proc/self/exe").string() +
                                " --gtest_filter=CudaRanksTest.TwoProcessesShareTheDevice";
    EXPECT_EQ(std::system(command.c_str()), 0) << rank;
  });
  test::expect_ok(outcomes);
  std::filesystem::remove(meet);
}

TEST_F(CudaParallelTest, BatchNormOfAllRanks) {
  const at::Tensor all = values({8, 3, 4, 4}, 1);
  torch::nn::BatchNorm2d whole(3);
  const at::Tensor expected = whole(all);
  test::run_group(2, [&](const ProcessGroup& group) {
    SyncBatchNorm norm(3, group);
    norm->to(kGpu);
    const at::Tensor got = norm(all.narrow(0, 4 * group.rank(), 4).to(kGpu));
    EXPECT_TRUE(at::allclose(got.cpu(), expected.narrow(0, 4 * group.rank(), 4), 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(norm->running_var.cpu(), whole->running_var, 1e-4, 1e-5));
  });
}

}  // namespace
}  // namespace lockstep::cuda_test
