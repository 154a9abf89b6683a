// What becomes of buffers, modes, threads and exceptions in the replicas of a DataParallel.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"
#include "tests/support/ddp_test_modules.h"

namespace lockstep {
namespace replicas_test {

namespace nn = torch::nn;
using ddp_test::fill;
using ddp_test::values;
using ::testing::HasSubstr;

DataParallelOptions on_cpus(size_t count) {
  return {.devices = std::vector<c10::Device>(count, c10::kCPU)};
}

nn::Sequential make_normed() {
  nn::Sequential net(nn::Linear(6, 4), nn::BatchNorm1d(4));
  fill(*net, 0);
  return net;
}

TEST(Replicas, RunningStatisticsAreTheFirstOnes) {
  // As many as a replica has: sums of more threads have another order.
  at::set_num_threads(1);
  auto net = make_normed(), alone = make_normed();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = values({10, 6}, step);
    parallel.forward(x);
    alone->forward(x.narrow(0, 0, 5));
  }
  const auto buffers = net->buffers(), expected = alone->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(at::equal(buffers[i], expected[i])) << i;
}

TEST(Replicas, EvaluateWithTheModulesStatistics) {
  auto net = make_normed();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor x = values({10, 6}, 7);
  for (int round = 0; round < 2; ++round) {
    parallel.forward(values({10, 6}, round));
    // The module alone changes its statistics in a way that no version counter shows.
    net->forward(values({8, 6}, 100 + round));
    net->eval();
    EXPECT_TRUE(at::equal(parallel.forward(x), at::cat({net->forward(x.narrow(0, 0, 5)),
                                                        net->forward(x.narrow(0, 5, 5))})));
    net->train();
  }
}

TEST(Replicas, FollowTheModesOfTheModulesParts) {
  nn::Sequential net(nn::BatchNorm1d(4), nn::Dropout(1.0));
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor x = values({6, 4}, 1);
  EXPECT_EQ(parallel.forward(x).abs().sum().item<double>(), 0) << "all is dropped";
  net->eval();
  EXPECT_TRUE(at::allclose(parallel.forward(x), net->forward(x)));
  net->train();
  net->children()[1]->eval();
  const auto seen = net->buffers()[2].item<int64_t>();
  EXPECT_GT(parallel.forward(x).abs().sum().item<double>(), 0);
  EXPECT_EQ(net->buffers()[2].item<int64_t>(), seen + 1);
}

struct TemperedImpl : nn::Cloneable<TemperedImpl> {
  TemperedImpl() { reset(); }
  void reset() override {
    dropout = register_module("dropout", nn::Dropout(1.0));
    register_parameter("weight", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) { return dropout(x) * temperature + offsets.at(0); }
  nn::Dropout dropout{nullptr};
  double temperature = 1;
  std::vector<double> offsets = {0};
};
TORCH_MODULE(Tempered);

TEST(Replicas, FollowMembersAndOptionsThatChange) {
  Tempered net;
  DataParallel<Tempered> parallel(net, on_cpus(2));
  const at::Tensor x = at::ones({4});
  EXPECT_TRUE(at::equal(parallel.forward(x), at::zeros({4})));
  net->dropout->options.p(0);
  EXPECT_TRUE(at::equal(parallel.forward(x), at::ones({4}))) << "an option of LibTorch's module";
  parallel.module().temperature = 0.5;
  EXPECT_TRUE(at::equal(parallel.forward(x), at::full({4}, 0.5))) << "a member of the module";
  net->offsets[0] = 1;
  parallel.remake_replicas();
  EXPECT_TRUE(at::equal(parallel.forward(x), at::full({4}, 1.5))) << "what a member points to";
}

struct HolderImpl : nn::Module {
  HolderImpl() { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  nn::Sequential inner{nn::Linear(4, 4), nn::Linear(4, 2)};
};
TORCH_MODULE(Holder);

TEST(Replicas, FollowALayerThatIsReplacedInASubmodule) {
  Holder net;
  DataParallel<Holder> parallel(net, on_cpus(2), [] { return Holder(); });
  const at::Tensor x = values({4, 4}, 0);
  parallel.forward(x);
  const auto layer = nn::Linear(4, 4);
  net->inner->replace_module("0", layer.ptr());
  net->inner = nn::Sequential(layer, nn::Linear(4, 2));
  net->replace_module("inner", net->inner);
  // A product of half of the rows may round in another order.
  EXPECT_TRUE(at::allclose(parallel.forward(x), net->forward(x), 1e-5, 1e-6));
  parallel.forward(x).sum().backward();
  EXPECT_TRUE(layer->weight.grad().defined());
}

TEST(Replicas, AreMadeAnewOnlyAfterAChange) {
  auto net = make_normed();
  int made = 0;
  DataParallel<nn::Sequential> parallel(net, on_cpus(2), [&made] {
    ++made;
    return make_normed();
  });
  for (int step = 0; step < 2; ++step) {
    parallel.forward(values({10, 6}, step)).sum().backward();
    net->eval();
    parallel.forward(values({10, 6}, step));
    net->train();
  }
  EXPECT_EQ(made, 2);
}

/// Tensors on any device: modules of LibTorch cannot be moved to "meta".
struct Anywhere : nn::Module {
  explicit Anywhere(c10::Device device) {
    const at::TensorOptions options = at::device(device);
    register_parameter("weight", at::zeros({6, 4}, options));
    register_parameter("bias", at::zeros({4}, options));
    register_buffer("mean", at::zeros({4}, options));
    register_buffer("table", at::zeros({1 << 20}, options));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(Replicas, OnOtherDevicesAreCopiedWhenSomethingChanged) {
  const auto net = std::make_shared<Anywhere>(c10::kCPU);
  detail::ReplicaSet set(net, {std::make_shared<Anywhere>(c10::kMeta)});
  set.refresh(1, false);
  int64_t before = 0;
  const auto copied = [&] { return set.copies() - std::exchange(before, set.copies()); };
  EXPECT_EQ(copied(), 4);
  set.refresh(1, false);
  EXPECT_EQ(copied(), 1) << "the small buffer: what batch norm writes raises no version";
  {
    const at::NoGradGuard no_grad;
    net->parameters()[1].add_(1);
  }
  set.refresh(1, false);
  EXPECT_EQ(copied(), 2) << "and one parameter";
}

/// Waits until so many are there at once; false when they do not come.
class Meeting {
 public:
  explicit Meeting(int expected) : expected_(expected) {}
  bool wait() {
    std::unique_lock lock(mutex_);
    if (++here_ == expected_) all_.notify_all();
    return all_.wait_for(lock, std::chrono::seconds(20), [&] { return here_ >= expected_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int expected_;
  int here_ = 0;
};

/// Meets the other replicas in forward and in backward.
class Meets : public torch::autograd::Function<Meets> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            Meeting* forward, Meeting* backward) {
    context->saved_data["backward"] = reinterpret_cast<int64_t>(backward);
    EXPECT_TRUE(forward->wait());
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an IValue holds no pointer.
    auto* meeting = reinterpret_cast<Meeting*>(context->saved_data["backward"].toInt());
    EXPECT_TRUE(meeting->wait());
    return {gradients[0], {}, {}};
  }
};

struct MeetingNet : nn::Cloneable<MeetingNet> {
  MeetingNet(Meeting* f, Meeting* b) : in_forward(f), in_backward(b) { reset(); }
  void reset() override { linear = register_module("linear", nn::Linear(2, 1)); }
  at::Tensor forward(const at::Tensor& x) {
    threads = at::get_num_threads();
    return Meets::apply(linear(x), in_forward, in_backward);
  }
  Meeting *in_forward, *in_backward;
  nn::Linear linear{nullptr};
  int threads = 0;
};

TEST(Replicas, RunAtOnceForwardAndBackward) {
  Meeting in_forward(3), in_backward(3);
  auto net = std::make_shared<MeetingNet>(&in_forward, &in_backward);
  DataParallel<std::shared_ptr<MeetingNet>> parallel(net, on_cpus(3));
  parallel.forward(at::ones({3, 2})).sum().backward();
}

/// Tells how many threads LibTorch has where it runs.
struct ThreadsNet : nn::Cloneable<ThreadsNet> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) {
    return at::full({x.size(0)}, at::get_num_threads(), at::kLong);
  }
};

TEST(Replicas, ShareTheCallersThreads) {
  const auto threads_of = [](int callers, size_t replicas, int asked) {
    at::set_num_threads(callers);
    auto options = on_cpus(replicas);
    options.threads_per_replica = asked;
    DataParallel<std::shared_ptr<ThreadsNet>> parallel(std::make_shared<ThreadsNet>(), options);
    const at::Tensor counts = parallel.forward(at::ones({static_cast<int64_t>(replicas)}));
    EXPECT_EQ(at::get_num_threads(), callers) << "the caller keeps its own";
    EXPECT_TRUE(counts.eq(counts[0]).all().item<bool>());
    return counts[0].item<int64_t>();
  };
  EXPECT_EQ(threads_of(4, 2, 0), 2);
  EXPECT_EQ(threads_of(1, 2, 0), 1);
  EXPECT_EQ(threads_of(3, 4, 0), 1);
  EXPECT_EQ(threads_of(2, 2, 3), 3);
}

TEST(Replicas, AreOnePerCoreUnlessNamed) {
  DataParallel<std::shared_ptr<ThreadsNet>> parallel(std::make_shared<ThreadsNet>());
  EXPECT_EQ(static_cast<int>(parallel.devices().size()), usable_cores());
}

/// Fails where a row is negative: in backward when it is below -1.
struct Picky : nn::Cloneable<Picky> {
  class Fails : public torch::autograd::Function<Fails> {
   public:
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
      return x * 1;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list) {
      throw NumericError("no gradient today");
    }
  };
  Picky() { reset(); }
  void reset() override { linear = register_module("linear", nn::Linear(2, 1)); }
  at::Tensor forward(const at::Tensor& x) {
    const double least = x.min().item<double>();
    if (least < -1) return Fails::apply(linear(x));
    if (least < 0) throw UsageError("rows must not be negative", "clamp them");
    return linear(x);
  }
  nn::Linear linear{nullptr};
};

TEST(Replicas, ErrorsNameTheReplicaAndItsDevice) {
  auto net = std::make_shared<Picky>();
  DataParallel<std::shared_ptr<Picky>> parallel(net, on_cpus(2));
  at::Tensor x = at::ones({4, 2});
  x[3].fill_(-1);
  try {
    parallel.forward(x);
    FAIL() << "the second replica throws";
  } catch (const ReplicaError& error) {
    EXPECT_EQ(error.replica(), 1U);
    EXPECT_EQ(error.device(), c10::Device(c10::kCPU));
    EXPECT_EQ(error.exit_code(), kExitUsage);
    EXPECT_THAT(error.what(), HasSubstr("replica 1 on device cpu: rows must not be negative"));
    EXPECT_THAT(error.what(), HasSubstr("hint: clamp them"));
    EXPECT_THROW(std::rethrow_exception(error.cause()), UsageError);
  }
  x[3].fill_(1);
  x[0].fill_(-2);
  const at::Tensor loss = parallel.forward(x).sum();
  try {
    loss.backward();
    FAIL() << "the first replica throws in backward";
  } catch (const ReplicaError& error) {
    EXPECT_THAT(error.what(), HasSubstr("replica 0 on device cpu: no gradient today"));
  }
  x[0].fill_(1);
  EXPECT_NO_THROW(parallel.forward(x).sum().backward()) << "the threads go on";
}

TEST(Replicas, WhatCannotBeCopiedIsRefused) {
  auto plain = std::make_shared<ddp_test::Net>();
  try {
    DataParallel<std::shared_ptr<ddp_test::Net>> parallel(plain, on_cpus(2));
    FAIL() << "it has no clone";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot be copied"));
    EXPECT_THAT(error.what(), HasSubstr("hint: derive it from torch::nn::Cloneable"));
  }
  EXPECT_NO_THROW(DataParallel<std::shared_ptr<ddp_test::Net>>(plain, on_cpus(1)));
  nn::Sequential small(nn::Linear(2, 2));
  try {
    DataParallel<nn::Sequential> parallel(small, on_cpus(2),
                                          [] { return nn::Sequential(nn::Linear(2, 3)); });
    FAIL() << "the copies have other shapes";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("other names, shapes or dtypes"));
  }
  EXPECT_THROW(DataParallel<nn::Sequential>(small, on_cpus(2), [&] { return small; }), UsageError);
}

TEST(Replicas, TheModuleMustBeOnTheFirstDevice) {
  struct Apart : nn::Module {
    Apart() {
      register_module("near", std::make_shared<Anywhere>(c10::kCPU));
      register_module("far", std::make_shared<Anywhere>(c10::kMeta));
    }
    at::Tensor forward(const at::Tensor& x) { return x; }
  };
  try {
    DataParallel<std::shared_ptr<Apart>> parallel(std::make_shared<Apart>(), on_cpus(2));
    FAIL() << "a half of it is on meta";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("on device cpu, the first one, but 'far.weight' is on meta"));
    EXPECT_THAT(error.what(), HasSubstr("hint: call module->to(\"cpu\")"));
  }
  const auto meta = std::make_shared<Anywhere>(c10::kMeta);
  EXPECT_THROW(DataParallel<std::shared_ptr<Anywhere>>{meta}, UsageError);
  EXPECT_THROW(DataParallel<nn::Sequential>(make_normed(), {.devices = {c10::kCPU, c10::kMeta}}),
               UsageError);
}

TEST(Replicas, LeaveRandomNumbersAsTheyAre) {
  auto net = make_normed();
  at::manual_seed(5);
  const at::Tensor expected = at::rand({3});
  at::manual_seed(5);
  const DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  EXPECT_TRUE(at::equal(at::rand({3}), expected));
}

}  // namespace replicas_test
}  // namespace lockstep
