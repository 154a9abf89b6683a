#include "lockstep/parallel/data_parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "lockstep/autograd/backward.h"
#include "lockstep/base/error.h"
#include "lockstep/optim/optim.h"
#include "tests/support/ddp_test_modules.h"

namespace lockstep {
namespace data_parallel_test {

namespace nn = torch::nn;
using ddp_test::fill;
using ddp_test::values;
using ::testing::HasSubstr;

DataParallelOptions on_cpus(size_t count) {
  return {.devices = std::vector<c10::Device>(count, c10::kCPU)};
}

/// Sums of one order only where one thread makes them.
class DataParallelTest : public ::testing::Test {
 protected:
  DataParallelTest() { at::set_num_threads(1); }
};

nn::Sequential make_net(double seed = 0) {
  nn::Sequential net(nn::Linear(6, 5), nn::Tanh(), nn::Linear(5, 3));
  fill(*net, seed);
  return net;
}

std::vector<at::Tensor> gradients_of(const nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) gradients.push_back(parameter.grad().clone());
  return gradients;
}

/// What Python's DataParallel adds up: the gradients of the parts, in their order. The gradient of
/// the gathered output is `weights`.
std::vector<at::Tensor> summed_by_hand(nn::Sequential net, const at::Tensor& x,
                                       const at::Tensor& weights, size_t replicas) {
  std::vector<at::Tensor> sums;
  const auto parts = x.chunk(static_cast<int64_t>(replicas));
  const auto part_weights = weights.chunk(static_cast<int64_t>(replicas));
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto gradients =
        torch::autograd::grad({net->forward(parts[i])}, net->parameters(), {part_weights[i]});
    for (size_t p = 0; p < gradients.size(); ++p) {
      if (i == 0) sums.push_back(gradients[p]);
      if (i > 0) sums[p] = sums[p] + gradients[p];
    }
  }
  return sums;
}

TEST_F(DataParallelTest, OutputsAndGradientsAreThePartsToTheLastBit) {
  for (const size_t replicas : {1, 2, 3, 4}) {
    for (const int64_t rows : {12, 7, 3, 1}) {
      auto net = make_net();
      DataParallel<nn::Sequential> parallel(net, on_cpus(replicas));
      const at::Tensor x = values({rows, 6}, 1), weights = values({rows, 3}, 2);
      const auto expected = summed_by_hand(net, x, weights, replicas);
      const at::Tensor y = parallel.forward(x);
      std::vector<at::Tensor> outputs;
      for (const auto& part : x.chunk(static_cast<int64_t>(replicas))) {
        outputs.push_back(net->forward(part));
      }
      EXPECT_TRUE(at::equal(y, at::cat(outputs)));
      y.backward(weights);
      const auto gradients = gradients_of(*net);
      for (size_t p = 0; p < expected.size(); ++p) {
        EXPECT_TRUE(at::equal(gradients[p], expected[p])) << replicas << " " << rows << " " << p;
      }
    }
  }
}

TEST_F(DataParallelTest, BothBackwardsGiveTheSame) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(3));
  const at::Tensor x = values({9, 6}, 1);
  parallel.forward(x).square().mean().backward();
  const auto engine = gradients_of(*net);
  zero_grad(net->parameters());
  const at::Tensor loss = parallel.forward(x).square().mean();
  EXPECT_TRUE(walks_backward(loss));
  backward(loss);
  const auto walk = gradients_of(*net);
  for (size_t p = 0; p < engine.size(); ++p) EXPECT_TRUE(at::equal(engine[p], walk[p]));
}

TEST_F(DataParallelTest, GradientsAddToThoseThatAreThere) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor x = values({8, 6}, 1), weights = values({8, 3}, 2);
  const auto once = summed_by_hand(net, x, weights, 2);
  parallel.forward(x).backward(weights);
  parallel.forward(x).backward(weights);
  const auto twice = gradients_of(*net);
  for (size_t p = 0; p < once.size(); ++p) EXPECT_TRUE(at::equal(twice[p], once[p] + once[p]));
}

TEST_F(DataParallelTest, InputsGetGradients) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor x = values({8, 6}, 1).requires_grad_();
  parallel.forward(x).square().sum().backward();
  const at::Tensor alone = values({8, 6}, 1).requires_grad_();
  net->forward(alone).square().sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), alone.grad(), 1e-6, 1e-7));
}

TEST_F(DataParallelTest, TrainsAsTheModuleAlone) {
  auto net = make_net(), alone = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const auto optimizer = make_optimizer("sgd", net->parameters(), {.lr = 0.1, .momentum = 0.9});
  const auto other = make_optimizer("sgd", alone->parameters(), {.lr = 0.1, .momentum = 0.9});
  for (int step = 0; step < 20; ++step) {
    const at::Tensor x = values({16, 6}, step), y = values({16, 3}, step + 0.5);
    zero_grad(net->parameters());
    (parallel.forward(x) - y).square().mean().backward();
    optimizer->step();
    zero_grad(alone->parameters());
    (alone->forward(x) - y).square().mean().backward();
    other->step();
  }
  // Two partial sums of float32 in place of one.
  for (size_t p = 0; p < net->parameters().size(); ++p) {
    EXPECT_TRUE(at::allclose(net->parameters()[p], alone->parameters()[p], 1e-5, 1e-6));
  }
}

TEST_F(DataParallelTest, SeesParametersThatWereReplaced) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor x = values({4, 6}, 1);
  parallel.forward(x);
  for (at::Tensor& parameter : net->parameters()) parameter.set_data(parameter.detach() * 2);
  EXPECT_TRUE(at::equal(parallel.forward(x), at::cat({net->forward(x.narrow(0, 0, 2)),
                                                      net->forward(x.narrow(0, 2, 2))})));
  net->to(at::kDouble);
  EXPECT_EQ(parallel.forward(x.to(at::kDouble)).scalar_type(), at::kDouble);
}

TEST_F(DataParallelTest, TwoForwardsBeforeABackward) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor a = values({4, 6}, 1), b = values({6, 6}, 2);
  const at::Tensor first = parallel.forward(a), second = parallel.forward(b);
  first.sum().backward();
  second.sum().backward();
  const auto both = gradients_of(*net);
  zero_grad(net->parameters());
  parallel.forward(a).sum().backward();
  parallel.forward(b).sum().backward();
  const auto expected = gradients_of(*net);
  for (size_t p = 0; p < both.size(); ++p) EXPECT_TRUE(at::equal(both[p], expected[p]));
}

TEST_F(DataParallelTest, GraphsAreKeptWhenAsked) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor loss = parallel.forward(values({4, 6}, 1)).square().sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = gradients_of(*net);
  loss.backward();
  const auto twice = gradients_of(*net);
  for (size_t p = 0; p < once.size(); ++p) EXPECT_TRUE(at::equal(twice[p], once[p] + once[p]));
  EXPECT_ANY_THROW(loss.backward());
}

TEST_F(DataParallelTest, GradientsOfGradients) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const auto penalty = [&](auto&& forward) {
    zero_grad(net->parameters());
    const at::Tensor x = values({4, 6}, 1).requires_grad_();
    const auto gradient = torch::autograd::grad({forward(x).sum()}, {x}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true);
    gradient[0].square().sum().backward();
    return net->parameters()[0].grad().clone();
  };
  const at::Tensor got = penalty([&](const at::Tensor& x) { return parallel.forward(x); });
  const at::Tensor expected = penalty([&](const at::Tensor& x) { return net->forward(x); });
  EXPECT_GT(expected.abs().max().item<double>(), 0.01);
  EXPECT_TRUE(at::allclose(got, expected, 1e-5, 1e-6));
}

TEST_F(DataParallelTest, AnUpdateBetweenForwardAndBackwardIsNoticed) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  const at::Tensor loss = parallel.forward(values({4, 6}, 1)).sum();
  {
    const at::NoGradGuard no_grad;
    net->parameters()[2].mul_(2);
  }
  EXPECT_THROW(loss.backward(), ReplicaError);
}

TEST_F(DataParallelTest, WithoutGradients) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  parallel.forward(values({4, 6}, 1)).sum().backward();
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(parallel.forward(values({4, 6}, 1)).requires_grad());
}

/// Tensors made under it can take part in no graph later.
TEST_F(DataParallelTest, TrainsAfterAnEvaluationInInferenceMode) {
  auto plain = make_net(), net = make_net();
  net->push_back(nn::BatchNorm1d(3));
  plain->push_back(nn::BatchNorm1d(3));
  DataParallel<nn::Sequential> parallel(net, on_cpus(2)), without(plain, on_cpus(2));
  const at::Tensor x = values({8, 6}, 1);
  const auto evaluate = [&] {
    const c10::InferenceMode inference;
    net->eval();
    const at::Tensor output = parallel.forward(x);
    net->train();
    return output.clone();
  };
  EXPECT_EQ(evaluate().sizes(), at::IntArrayRef({8, 3}));
  for (int step = 0; step < 2; ++step) {
    for (auto* each : {&parallel, &without}) {
      backward(each->forward(x).square().sum());
      for (at::Tensor& parameter : each->module().parameters()) {
        parameter.data().sub_(parameter.grad() * 0.1);
        parameter.mutable_grad().reset();
      }
    }
    evaluate();
  }
  const auto got = net->parameters(), expected = plain->parameters();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

TEST_F(DataParallelTest, ReplicasComputeUnderTheCallersAutocast) {
  auto net = make_net();
  DataParallel<nn::Sequential> parallel(net, on_cpus(2));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto type = parallel.forward(values({4, 6}, 1)).scalar_type();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(type, at::kBFloat16);
}

TEST_F(DataParallelTest, FrozenAndUnusedParametersGetNoGradient) {
  struct Net : nn::Cloneable<Net> {
    Net() { reset(); }
    void reset() override {
      used = register_module("used", nn::Linear(6, 2));
      frozen = register_module("frozen", nn::Linear(6, 2));
      unused = register_module("unused", nn::Linear(6, 2));
    }
    at::Tensor forward(const at::Tensor& x) { return used(x) + frozen(x); }
    nn::Linear used{nullptr}, frozen{nullptr}, unused{nullptr};
  };
  auto net = std::make_shared<Net>();
  for (auto& parameter : net->frozen->parameters()) parameter.requires_grad_(false);
  DataParallel<std::shared_ptr<Net>> parallel(net, on_cpus(2));
  parallel.forward(values({4, 6}, 1)).sum().backward();
  EXPECT_TRUE(net->used->weight.grad().defined());
  EXPECT_FALSE(net->frozen->weight.grad().defined());
  EXPECT_FALSE(net->unused->weight.grad().defined());
}

TEST_F(DataParallelTest, TiedParametersGetOneGradient) {
  auto tied = std::make_shared<ddp_test::Tied>();
  fill(*tied, 1);
  DataParallel<std::shared_ptr<ddp_test::Tied>> parallel(
      tied, on_cpus(2), [] { return std::make_shared<ddp_test::Tied>(); });
  const at::Tensor x = values({4, 4}, 1);
  parallel.forward(x).sum().backward();
  std::vector<at::Tensor> parts;
  for (const auto& part : x.chunk(2)) {
    parts.push_back(torch::autograd::grad({tied->forward(part).sum()}, {tied->weight})[0]);
  }
  EXPECT_TRUE(at::equal(tied->weight.grad(), parts[0] + parts[1]));
}

TEST_F(DataParallelTest, AnyInputsAndOutputs) {
  auto rich = std::make_shared<ddp_test::Rich>();
  DataParallel<std::shared_ptr<ddp_test::Rich>> parallel(
      rich, on_cpus(2), [] { return std::make_shared<ddp_test::Rich>(); });
  const at::Tensor x = values({4, 6}, 1), y = values({4, 6}, 2);
  const auto answer = parallel.forward(std::make_tuple(x, y), 2.0);
  const auto alone = rich->forward({x, y}, 2.0);
  EXPECT_TRUE(at::allclose(answer.logits, alone.logits));
  EXPECT_TRUE(at::allclose(answer.extra.at("other"), alone.extra.at("other")));
  EXPECT_EQ(answer.extra.at("constant").numel(), 4) << "two of each replica";
  EXPECT_EQ(answer.count, 7);
  (answer.logits.sum() + answer.extra.at("other").sum()).backward();
  EXPECT_TRUE(rich->b->weight.grad().defined());
}

/// Takes two inputs, of which one may depend on the other, and keeps one tensor aside.
struct TwoInputs : nn::Module {
  explicit TwoInputs(double value) { weight = register_parameter("w", at::full({3}, value)); }
  at::Tensor forward(at::Tensor a, const at::Tensor& b) {
    aside = b.exp();
    if (in_place) a.mul_(2);
    return weight * a.sigmoid() * b.square();
  }
  at::Tensor weight, aside;
  bool in_place = false;
};

/// What the calls give x and the two weights: `joined` by parallel_apply, or one after the other.
std::vector<at::Tensor> gradients_of_dependent_inputs(bool joined, bool in_place, bool twice) {
  const std::vector<std::shared_ptr<TwoInputs>> modules{std::make_shared<TwoInputs>(0.5),
                                                        std::make_shared<TwoInputs>(2)};
  const at::Tensor x = values({3}, 1).requires_grad_();
  std::vector<std::tuple<at::Tensor, at::Tensor>> inputs;
  for (const auto& module : modules) {
    module->in_place = in_place;
    // On x, on a weight, and on each other.
    const at::Tensor a = x * modules[0]->weight;
    inputs.emplace_back(in_place ? a * 1 : a, a.sigmoid());
  }
  std::vector<at::Tensor> outputs;
  if (joined) {
    outputs = parallel_apply(modules, inputs);
  } else {
    for (size_t i = 0; i < 2; ++i) {
      const auto& [a, b] = inputs[i];
      outputs.push_back(modules[i]->forward(a, b));
    }
  }
  const at::Tensor loss = outputs[0].sum() + outputs[1].square().sum();
  const std::vector<at::Tensor> leaves{x, modules[0]->weight, modules[1]->weight};
  if (!twice) return torch::autograd::grad({loss}, leaves);
  const auto first = torch::autograd::grad({loss}, leaves, {}, {}, /*create_graph=*/true);
  at::Tensor second = modules[0]->aside.sum() + modules[1]->aside.sum();
  for (const at::Tensor& gradient : first) second = second + gradient.square().sum();
  return torch::autograd::grad({second}, leaves);
}

TEST_F(DataParallelTest, InputsThatDependOnEachOtherPassTheirGradientsOnOnce) {
  for (const bool in_place : {false, true}) {
    for (const bool twice : {false, true}) {
      const auto got = gradients_of_dependent_inputs(true, in_place, twice);
      const auto expected = gradients_of_dependent_inputs(false, in_place, twice);
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6))
            << in_place << twice << i << got[i] << expected[i];
      }
    }
  }
}

struct GivesItBack : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST_F(DataParallelTest, InputsMayBeOutputsAndComeFromReplicas) {
  const std::vector<std::shared_ptr<GivesItBack>> idle(2, std::make_shared<GivesItBack>());
  nn::Sequential net(nn::Linear(3, 3));
  fill(*net, 1);
  const std::vector<nn::Sequential> nets{net, net};
  const at::Tensor x = values({2, 3}, 1).requires_grad_();
  auto outputs = parallel_apply(nets, parallel_apply(idle, parallel_apply(nets, {x, x})));
  const auto leaves = [&] {
    auto all = net->parameters();
    all.push_back(x);
    return all;
  }();
  const auto got = torch::autograd::grad({outputs[0].square().sum() + outputs[1].sum()}, leaves);
  const at::Tensor y = net->forward(net->forward(x));
  const auto expected = torch::autograd::grad({y.square().sum() + y.sum()}, leaves);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i])) << i;
}

/// Makes a loss of its samples.
struct LossNet : nn::Cloneable<LossNet> {
  LossNet() { reset(); }
  void reset() override { linear = register_module("linear", nn::Linear(2, 1)); }
  at::Tensor forward(const at::Tensor& x) { return linear(x).mean(); }
  nn::Linear linear{nullptr};
};

TEST_F(DataParallelTest, LossesAreAVectorWhateverTheBatch) {
  const auto net = std::make_shared<LossNet>();
  DataParallel<std::shared_ptr<LossNet>> parallel(net, on_cpus(2)), alone(net, on_cpus(1));
  for (const int64_t rows : {4, 2, 1}) {
    const at::Tensor x = values({rows, 2}, 1);
    EXPECT_EQ(parallel.forward(x).sizes(), (std::vector<int64_t>{std::min<int64_t>(rows, 2)}));
    EXPECT_EQ(alone.forward(x).dim(), 0) << "as in Python";
  }
}

TEST_F(DataParallelTest, FunctionsComposeByHand) {
  auto net = make_net();
  const std::vector<c10::Device> devices(2, c10::kCPU);
  const at::Tensor x = values({6, 6}, 1), weights = values({6, 3}, 2);
  const auto expected = summed_by_hand(net, x, weights, 2);
  const auto replicas = replicate(net, devices);
  const auto outputs = parallel_apply(replicas, scatter(x, devices), devices);
  gather(outputs, c10::kCPU).backward(weights);
  for (size_t p = 0; p < expected.size(); ++p) {
    EXPECT_TRUE(at::equal(net->parameters()[p].grad(), expected[p]));
  }
  EXPECT_TRUE(at::equal(data_parallel(net, x, on_cpus(2)), gather(outputs, c10::kCPU)));
  EXPECT_THROW(parallel_apply(replicas, std::vector<at::Tensor>{x}), UsageError);
}

}  // namespace data_parallel_test
}  // namespace lockstep
