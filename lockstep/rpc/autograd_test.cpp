#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/optim/adam.h>

#include <atomic>
#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"
#include "tests/support/run_workers.h"
#include "tests/support/test_wait.h"

namespace lockstep::rpc {
namespace autograd_test {

using test::run_workers;
using test_wait::wait_until;

at::Tensor seeded(std::vector<int64_t> shape, uint64_t seed) {
  at::manual_seed(seed);
  return at::randn(shape);
}

/// A layer, on its owner or in a plain process.
struct Layer {
  at::Tensor weight;
  at::Tensor forward(const at::Tensor& x) const { return x.matmul(weight).tanh(); }
  RRef<at::Tensor> parameter() const { return RRef<at::Tensor>::own(weight); }
};
std::shared_ptr<Layer> make_layer(int seed) {
  return std::make_shared<Layer>(Layer{seeded({6, 6}, seed).requires_grad_()});
}
const auto remote_layer = function("make_layer", make_layer);
const auto forward = method("Layer.forward", &Layer::forward);
const auto parameter = method("Layer.parameter", &Layer::parameter);
// Calls the second layer from within the worker of the first.
const auto forward_through = function(
    "forward_through", [](const RRef<Layer>& first, const RRef<Layer>& second, at::Tensor x) {
      return second.rpc_sync(forward, first.local_value().forward(x));
    });
const auto gradient_there =
    function("gradient_there", [](const RRef<Layer>& layer, int64_t context) {
      return gradients_of(context, {layer.local_value().weight}).front();
    });
const auto adam = function("adam", [](const std::vector<RRef<at::Tensor>>& owned) {
  return owner_optimizer(owned, [](const std::vector<at::Tensor>& parameters) {
    return std::make_shared<torch::optim::Adam>(parameters);
  });
});

// Answers when the call's context is no more here.
std::atomic<bool> waits_for_the_end = false;
const auto outlive = function("outlive", [](const at::Tensor& x) {
  namespace native = torch::distributed::autograd;
  const int64_t context = native::DistAutogradContainer::currentContextId();
  waits_for_the_end = true;
  wait_until(
      [&] {
        try {
          native::DistAutogradContainer::getInstance().retrieveContext(context);
          return false;
        } catch (const c10::Error&) {
          return true;
        }
      },
      "the end of the context");
  return x * 2;
});
const auto outlives = function("outlives", [] { return waits_for_the_end.load(); });

TEST(RpcAutograd, ACallThatOutlivesItsContextFailsByAWordOfIt) {
  run_workers(2, [](Agent&, int rank) {
    if (rank != 0) return;
    std::optional<AutogradContext> context(std::in_place);
    const auto result = call_async("w1", outlive, at::ones({2}).requires_grad_());
    wait_until([] { return call("w1", outlives); }, "the function");
    context.reset();
    EXPECT_THROW(result.wait(), UsageError);
  });
}

at::Tensor loss_of(const at::Tensor& a, const at::Tensor& b, const at::Tensor& own) {
  return (a * own + b).square().sum();
}

TEST(RpcAutograd, GivesOneProcesssBitsOverThreeWorkers) {
  run_workers(3, [](Agent&, int rank) {
    if (rank != 0) return;
    const auto x = seeded({4, 6}, 1);
    const auto own = seeded({6}, 2).requires_grad_();
    const auto one = remote("w1", remote_layer, 3), two = remote("w2", remote_layer, 4);
    const auto plain_own = own.detach().clone().requires_grad_();
    const auto plain_one = make_layer(3), plain_two = make_layer(4);

    AutogradContext context;
    // w1 is used twice, once from here and once with a call of its own to w2.
    const auto loss =
        loss_of(call("w1", forward_through, one, two, x), one.rpc_sync(forward, x), own);
    context.backward({loss});
    const auto plain =
        loss_of(plain_two->forward(plain_one->forward(x)), plain_one->forward(x), plain_own);
    plain.backward();
    EXPECT_TRUE(at::equal(loss.detach(), plain.detach()));
    EXPECT_TRUE(at::equal(context.gradient(own), plain_own.grad()));
    EXPECT_FALSE(own.grad().defined());
    EXPECT_TRUE(at::equal(call("w1", gradient_there, one, context.id()), plain_one->weight.grad()));
    EXPECT_TRUE(at::equal(call("w2", gradient_there, two, context.id()), plain_two->weight.grad()));
    EXPECT_THROW(AutogradContext(), UsageError);
  });
}

template <class MakeRemote, class MakeLocal>
void expect_same_training(const MakeRemote& make_remote, const MakeLocal& make_local) {
  const auto one = remote("w1", remote_layer, 3), two = remote("w2", remote_layer, 4);
  const auto plain_one = make_layer(3), plain_two = make_layer(4);
  auto optimizer = make_remote(std::vector{one.rpc_sync(parameter), two.rpc_sync(parameter)});
  // An owner steps its own parameters alone.
  const auto local_one = make_local({plain_one->weight}),
             local_two = make_local({plain_two->weight});
  for (int step = 0; step < 5; ++step) {
    const auto x = seeded({4, 6}, 10 + step);
    {
      AutogradContext context;
      context.backward({two.rpc_sync(forward, one.rpc_sync(forward, x)).square().sum()});
      optimizer.step(context);
    }
    lockstep::zero_grad({plain_one->weight, plain_two->weight});
    plain_two->forward(plain_one->forward(x)).square().sum().backward();
    local_one->step();
    local_two->step();
  }
  EXPECT_TRUE(at::equal(one.rpc_sync(parameter).to_here(), plain_one->weight));
  EXPECT_TRUE(at::equal(two.rpc_sync(parameter).to_here(), plain_two->weight));
}

TEST(RpcOptimizer, TrainsToOneProcesssBits) {
  run_workers(3, [](Agent&, int rank) {
    if (rank != 0) return;
    const OptimizerOptions options{.lr = 0.05, .momentum = 0.9};
    expect_same_training(
        [&](const auto& parameters) { return DistributedOptimizer("sgd", parameters, options); },
        [&](std::vector<at::Tensor> own) {
          return make_optimizer("sgd", std::move(own), options);
        });
    expect_same_training(
        [&](const auto& parameters) { return DistributedOptimizer(adam, parameters); },
        [&](std::vector<at::Tensor> own) { return std::make_shared<torch::optim::Adam>(own); });
    EXPECT_THROW(DistributedOptimizer("sgdd", {RRef<at::Tensor>::own(at::ones({1}))}), RemoteError);
    EXPECT_THROW(DistributedOptimizer("sgd", {}), UsageError);
  });
}

}  // namespace autograd_test
}  // namespace lockstep::rpc
