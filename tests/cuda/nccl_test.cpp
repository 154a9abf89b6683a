#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "tests/cuda/cuda_testing.h"

namespace lockstep::cuda_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using nlohmann::json;

class NcclTest : public Nccl {};

/// Of one rank the result of every call is what it was given.
void expect_all_calls(const ProcessGroup& group, const at::Tensor& given) {
  const auto fresh = [&] { return at::zeros_like(given); };
  for (const ReduceOp op :
       {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    if (op == ReduceOp::avg && !given.is_floating_point()) continue;
    at::Tensor x = given.clone(), output = fresh();
    group.all_reduce(x, op);
    expect_equal(x, given, "all_reduce");
    group.reduce(x, 0, op);
    expect_equal(x, given, "reduce");
    group.reduce_scatter(output, {given}, op);
    expect_equal(output, given, "reduce_scatter");
    group.reduce_scatter_tensor(output, given, op);
    expect_equal(output, given, "reduce_scatter_tensor");
  }
  at::Tensor x = given.clone(), output = fresh();
  Tensors outputs{fresh()}, several{given.clone(), given.clone()};
  group.broadcast(x, 0);
  expect_equal(x, given, "broadcast");
  group.all_reduce_coalesced(several);
  for (const at::Tensor& one : several) expect_equal(one, given, "all_reduce_coalesced");
  group.all_gather(outputs, given);
  expect_equal(outputs[0], given, "all_gather");
  group.all_gather_into_tensor(output.zero_(), given);
  expect_equal(output, given, "all_gather_into_tensor");
  outputs[0].zero_();
  group.gather(outputs, given, 0);
  expect_equal(outputs[0], given, "gather");
  group.scatter(output.zero_(), {given}, 0);
  expect_equal(output, given, "scatter");
  outputs[0].zero_();
  group.all_to_all(outputs, {given});
  expect_equal(outputs[0], given, "all_to_all");
  group.all_to_all_single(output.zero_(), given);
  expect_equal(output, given, "all_to_all_single");
  for (const Work& work : group.batch_isend_irecv(
           {{P2POp::Kind::recv, output.zero_(), 0}, {P2POp::Kind::send, given, 0}}))
    work.wait();
  expect_equal(output, given, "batch_isend_irecv");
}

TEST_F(NcclTest, EveryCallGivesTheValuesOfTheCpu) {
  const World world = world_of_one();
  EXPECT_EQ(world.device(), kGpu);
  const at::Tensor values = at::arange(24, at::kFloat).add(1).view({4, 6});
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte})
    expect_all_calls(world.group(), values.to(kGpu, dtype));
  test::run_group(1, [&](const ProcessGroup& group) {
    at::Tensor x = values.clone();
    group.all_reduce(x, ReduceOp::avg);
    expect_equal(x, values);
  });
}

TEST_F(NcclTest, NumbersObjectsAndGroupsTravelOverTheGpu) {
  const World world = world_of_one();
  const ProcessGroup& group = world.group();
  double loss = 1.25;
  int64_t seen = 7;
  group.all_reduce_values(loss, seen);
  EXPECT_EQ(loss, 1.25);
  EXPECT_EQ(seen, 7);
  const json object{{"a", 1}, {"b", {"x", nullptr}}};
  EXPECT_EQ(group.all_gather_object(object), std::vector<json>{object});
  EXPECT_EQ(group.gather_object(object, 0), std::vector<json>{object});
  EXPECT_EQ(group.broadcast_object(object, 0), object);
  EXPECT_EQ(group.scatter_object({object}, 0), object);
  group.barrier();
  group.monitored_barrier(std::chrono::seconds(20));
  const at::Tensor given = at::ones({3}, kGpu);
  for (const ProcessGroup& other : {group.split(0), world.new_group({0})}) {
    at::Tensor x = given.clone();
    other.all_reduce(x);
    expect_equal(x, given);
  }
  const ProcessGroup on_cpu = world.new_group({0}, "gloo");
  at::Tensor x = at::ones({3});
  on_cpu.all_reduce(x);
  expect_equal(x, given);
  EXPECT_EQ(group.symmetric_empty(5, at::kFloat).device(), kGpu);
  EXPECT_FALSE(common_empty(group, 5, at::kFloat).defined());
}

TEST_F(NcclTest, AResultIsUsedOnTheCurrentStreamAfterWait) {
  const World world = world_of_one();
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  for (const c10::Stream stream :
       {device.getStream(kGpu), device.getStreamFromGlobalPool(kGpu, /*isHighPriority=*/false)}) {
    const c10::StreamGuard guard(stream);
    const at::Tensor base = at::rand({2048, 2048}, at::device(kGpu).dtype(at::kFloat)).mul_(1e-3);
    for (int i = 0; i < 20; ++i) {
      at::Tensor x = base;
      for (int k = 0; k < 8; ++k) x = at::mm(x, base);  // Still computed when the call begins.
      x.fill_(i);
      at::Tensor gathered = at::full_like(x, -1);
      const Work work = world.group().all_gather_into_tensor_async(gathered, x);
      work.wait();
      const at::Tensor next = gathered + 1;
      EXPECT_EQ(next.sum(at::kDouble).item<double>(), (i + 1.0) * 2048 * 2048);
      EXPECT_TRUE(work.is_completed());
    }
  }
}

TEST_F(NcclTest, WaitDoesNotHoldTheHost) {
  const World world = world_of_one();
  const at::Tensor base = at::rand({8192, 8192}, at::device(kGpu).dtype(at::kFloat)).mul_(1e-3);
  at::Tensor x = base;
  for (int k = 0; k < 20; ++k) x = at::mm(x, base);  // Some 20 ms each.
  const Work work = world.group().all_reduce_async(x);
  work.wait();
  EXPECT_FALSE(work.is_completed());
  x.sum().item<float>();
  bool called = false;
  work.then([&](const std::exception_ptr& error) { called = !error; });
  EXPECT_TRUE(called);
}

TEST_F(NcclTest, MistakesAreErrors) {
  const World world = world_of_one();
  at::Tensor on_cpu = at::ones({4});
  at::Tensor strided = at::ones({4, 4}, kGpu).t();
  EXPECT_THROW(world.group().all_reduce(on_cpu), Error);
  EXPECT_THROW(world.group().all_gather_into_tensor(strided, strided), Error);
  at::Tensor received = at::ones({4}, kGpu);
  EXPECT_THROW(world.group().recv_any(received), Error);
  at::Tensor x = at::ones({4}, kGpu);
  world.group().all_reduce(x);
  expect_equal(x, at::ones({4}));
}

TEST_F(NcclTest, AClosedGroupSaysSo) {
  World world = world_of_one();
  const ProcessGroup group = world.group();
  at::Tensor x = at::ones({4}, kGpu);
  group.all_reduce(x);
  world.close();
  EXPECT_THROW(group.all_reduce(x), CommError);
}

/// The context of a rank whose device is the one GPU.
std::shared_ptr<GroupContext> context_on_gpu(int rank, int size, Store store,
                                             std::chrono::milliseconds timeout) {
  test::RankOptions options;
  options.store = std::move(store);
  options.timeout = timeout;
  options.backend = "nccl";
  auto context = test::test_context(rank, size, options);
  context->device = kGpu;
  return context;
}

TEST_F(NcclTest, TwoRanksOnOneDeviceAreRefused) {
  const Store store = hash_store();
  const auto begin = std::chrono::steady_clock::now();
  const auto outcomes = test::run_ranks(2, [&](int rank) {
    const auto context = context_on_gpu(rank, 2, store.clone(), std::chrono::seconds(30));
    form_group(context, kDefaultGroup, {0, 1}, "nccl");
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<CommError>()) << outcome.text();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(25));
}

TEST_F(NcclTest, ARankThatNeverComesIsNamed) {
  InitOptions options;
  options.backend = "nccl";
  options.store = hash_store();
  options.rank = 0;
  options.world_size = 2;
  options.timeout = std::chrono::seconds(3);
  const auto outcome = test::outcome_of([&] { init(options); });
  EXPECT_TRUE(outcome.is<TimeoutError>()) << outcome.text();
  EXPECT_TRUE(outcome.failure().concerns(1)) << outcome.text();
}

TEST_F(NcclTest, ARankWithoutADeviceIsNamedOnAllRanks) {
  const int devices = at::getNumGPUs();
  const Store store = hash_store();
  const auto outcomes = test::run_ranks(devices + 1, [&](int rank) {
    InitOptions options;
    options.backend = "nccl";
    options.store = store.clone();
    options.rank = rank;
    options.world_size = devices + 1;
    options.timeout = std::chrono::seconds(30);
    init(options);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.is<UsageError>()) << outcome.text();
    EXPECT_NE(outcome.text().find("rank " + std::to_string(devices)), std::string::npos);
  }
}

class GlooOnCudaTest : public Cuda {};

TEST_F(GlooOnCudaTest, CollectivesOfTwoRanksThatShareTheDevice) {
  test::run_group(2, [](const ProcessGroup& group) {
    const int rank = group.rank();
    const auto mine = [&] { return at::full({5}, rank + 1.0, at::device(kGpu)); };
    const at::Tensor both = at::tensor({1.0F, 2.0F}).repeat_interleave(5).view({2, 5});
    at::Tensor x = mine();
    group.all_reduce(x);
    expect_equal(x, at::full({5}, 3.0), "all_reduce");
    x = mine();
    group.broadcast(x, 1);
    expect_equal(x, both[1], "broadcast");
    Tensors outputs{mine(), mine()};
    group.all_gather(outputs, mine());
    expect_equal(at::stack(outputs), both, "all_gather");
    at::Tensor work_result = mine();
    const Work work = group.all_reduce_async(work_result);
    work.wait();
    expect_equal(work_result, at::full({5}, 3.0), "all_reduce_async");
    group.barrier();
  });
}

TEST_F(GlooOnCudaTest, ShardsAndMessages) {
  test::run_group(2, [](const ProcessGroup& group) {
    const at::Tensor mine = at::full({5}, group.rank() + 1.0, at::device(kGpu));
    at::Tensor gathered = at::zeros({10}, mine.options()), part = at::zeros_like(mine);
    group.all_gather_into_tensor(gathered, mine);
    expect_equal(gathered, at::tensor({1.0F, 2.0F}).repeat_interleave(5));
    group.reduce_scatter_tensor(part, at::cat({mine, mine}));
    expect_equal(part, at::full({5}, 3.0));
    EXPECT_THROW(group.send(mine, 1 - group.rank()), UsageError);
    EXPECT_THROW(group.recv(part, 1 - group.rank()), UsageError);
  });
}

TEST_F(GlooOnCudaTest, SharedMemoryRefusesTensorsOfADevice) {
  for (const char* backend : {"shm", "hierarchical"}) {
    test::RankOptions options;
    options.backend = backend;
    if (options.backend == "hierarchical") options.hosts = "aab";
    test::run_group(
        3,
        [](const ProcessGroup& group) {
          at::Tensor x = at::ones({4}, kGpu);
          EXPECT_THROW(group.all_reduce(x), UsageError);
          at::Tensor y = at::ones({4});
          group.all_reduce(y);
          expect_equal(y, at::full({4}, 3.0));
        },
        options);
  }
}

}  // namespace
}  // namespace lockstep::cuda_test
