#include "lockstep/models/norm_pool.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/models/norm_pool_kernels.h"

namespace lockstep {
namespace norm_pool {
extern const AllKernels kernels_plain;
}
namespace norm_pool_test {

namespace nn = torch::nn;

/// Threads of OpenMP wait by spinning, which takes seconds where tests run side by side.
struct OneThread : ::testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const kOneThread = ::testing::AddGlobalTestEnvironment(new OneThread);

at::Tensor channels_last(const at::Tensor& x) {
  return x.contiguous(at::MemoryFormat::ChannelsLast);
}

at::Tensor images(at::IntArrayRef shape, double scale = 1, double shift = 0) {
  return channels_last(at::randn(shape) * scale + shift);
}

nn::BatchNorm2d make_norm(int64_t channels) {
  nn::BatchNorm2d norm(channels);
  const at::NoGradGuard no_grad;
  norm->weight.copy_(at::randn({channels}));  // Of both signs.
  norm->bias.copy_(at::randn({channels}) * 0.3);
  return norm;
}

struct Results {
  at::Tensor out, grad_x, grad_weight, grad_bias, running_mean, running_var;
  int64_t batches = 0;
};

/// A forward and a backward of `run` from x, with a gradient that depends on the place only.
template <class Run>
Results results_of(const at::Tensor& x, nn::BatchNorm2dImpl& norm, Run run) {
  at::Tensor input = x.detach().clone().requires_grad_();
  for (auto& parameter : norm.parameters()) parameter.mutable_grad().reset();
  const at::Tensor out = run(input, norm);
  const at::Tensor weights =
      at::arange(out.numel(), at::kDouble).mul(0.37).sin().to(at::kFloat).view(out.sizes());
  out.backward(weights.to(out.scalar_type()));
  return {out.detach(),
          input.grad(),
          norm.weight.grad(),
          norm.bias.grad(),
          norm.running_mean,
          norm.running_var,
          norm.num_batches_tracked.item<int64_t>()};
}

at::Tensor separately(const at::Tensor& x, nn::BatchNorm2dImpl& norm) {
  return at::max_pool2d(at::relu(norm.forward(x)), {2, 2}, {2, 2});
}

/// The largest difference in parts of the largest value.
double difference(const at::Tensor& a, const at::Tensor& b) {
  const auto left = a.to(at::kDouble), right = b.to(at::kDouble);
  return (left - right).abs().max().item<double>() / (1e-30 + right.abs().max().item<double>());
}

std::shared_ptr<nn::BatchNorm2dImpl> in_double(const nn::BatchNorm2d& norm) {
  auto copy = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(norm->clone());
  copy->to(at::kDouble);
  return copy;
}

void expect_close(const Results& own, const Results& exact) {
  // float32 has 24 bits: 6e-8. What is summed is a few thousand values in chunks, so a few units in
  // the last place of the largest.
  constexpr double kTolerance = 2e-6;
  EXPECT_LT(difference(own.out, exact.out), kTolerance);
  EXPECT_LT(difference(own.grad_x, exact.grad_x), kTolerance);
  EXPECT_LT(difference(own.grad_weight, exact.grad_weight), kTolerance);
  EXPECT_LT(difference(own.grad_bias, exact.grad_bias), kTolerance);
  EXPECT_LT(difference(own.running_mean, exact.running_mean), kTolerance);
  EXPECT_LT(difference(own.running_var, exact.running_var), kTolerance);
  EXPECT_EQ(own.batches, exact.batches);
}

class Shapes : public ::testing::TestWithParam<std::vector<int64_t>> {};
INSTANTIATE_TEST_SUITE_P(NormPool, Shapes,
                         ::testing::Values(std::vector<int64_t>{1, 8, 2, 2},
                                           std::vector<int64_t>{3, 8, 5, 4},
                                           std::vector<int64_t>{2, 24, 4, 7},
                                           std::vector<int64_t>{5, 16, 28, 28},
                                           std::vector<int64_t>{2, 64, 13, 13}));

TEST_P(Shapes, AgreesWithTheOperationsInDouble) {
  at::manual_seed(1);
  const at::Tensor x = images(GetParam(), 3, 2);
  auto norm = make_norm(GetParam()[1]);
  const auto exact_norm = in_double(norm);
  ASSERT_TRUE(norm_relu_pool_is_fused(x, *norm));
  const Results exact = results_of(x.to(at::kDouble), *exact_norm, separately);
  const Results own = results_of(x, *norm, norm_relu_pool);
  EXPECT_TRUE(own.out.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(own.grad_x.is_contiguous(at::MemoryFormat::ChannelsLast));
  expect_close(own, exact);
}

TEST(NormPool, AMeanFarFromZeroCostsNoPrecision) {
  at::manual_seed(2);
  const at::Tensor x = images({8, 16, 12, 12}, 1, 1000);
  auto norm = make_norm(16);
  const auto exact_norm = in_double(norm);
  const Results exact = results_of(x.to(at::kDouble), *exact_norm, separately);
  const Results own = results_of(x, *norm, norm_relu_pool);
  EXPECT_LT(difference(own.running_var, exact.running_var), 1e-6);
  EXPECT_LT(difference(own.out, exact.out), 1e-4);  // x itself has 6e-5 of its deviation.
}

TEST(NormPool, NoWorseThanTheOperationsThemselves) {
  at::manual_seed(3);
  const at::Tensor x = images({64, 16, 28, 28});
  auto norm = make_norm(16);
  auto other = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(norm->clone());
  const auto exact_norm = in_double(norm);
  const Results exact = results_of(x.to(at::kDouble), *exact_norm, separately);
  const Results plain = results_of(x, *other, separately);
  const Results own = results_of(x, *norm, norm_relu_pool);
  const auto as_good = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& right) {
    EXPECT_LT(difference(a, right), 2 * difference(b, right) + 2e-7);
  };
  as_good(own.out, plain.out, exact.out);
  as_good(own.grad_x, plain.grad_x, exact.grad_x);
  as_good(own.grad_weight, plain.grad_weight, exact.grad_weight);
  as_good(own.grad_bias, plain.grad_bias, exact.grad_bias);
  as_good(own.running_var, plain.running_var, exact.running_var);
}

TEST(NormPool, TheFirstOfEqualsGetsTheGradient) {
  at::manual_seed(4);
  const at::Tensor x = channels_last(at::randint(3, {4, 8, 6, 6}).to(at::kFloat));
  auto norm = make_norm(8);
  const auto exact_norm = in_double(norm);
  const Results exact = results_of(x.to(at::kDouble), *exact_norm, separately);
  expect_close(results_of(x, *norm, norm_relu_pool), exact);
}

TEST(NormPool, ANanStaysOne) {
  at::manual_seed(5);
  at::Tensor x = images({2, 8, 4, 4});
  x[1][3][2][1] = std::numeric_limits<float>::quiet_NaN();
  auto norm = make_norm(8);
  const at::Tensor out = norm_relu_pool(x, *norm);
  EXPECT_TRUE(out.select(1, 3).isnan().all().item<bool>());
  EXPECT_FALSE(out.select(1, 2).isnan().any().item<bool>());
  EXPECT_TRUE(norm->running_var[3].isnan().item<bool>());
}

TEST(NormPool, TheSameBitsWithAnyNumberOfThreads) {
  at::manual_seed(6);
  const at::Tensor x = images({17, 16, 14, 14});
  const auto norm = make_norm(16);
  const int before = at::get_num_threads();
  std::vector<Results> all;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    auto copy = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(norm->clone());
    all.push_back(results_of(x, *copy, norm_relu_pool));
  }
  at::set_num_threads(before);
  for (const Results& one : all) {
    EXPECT_TRUE(at::equal(one.out, all[0].out));
    EXPECT_TRUE(at::equal(one.grad_x, all[0].grad_x));
    EXPECT_TRUE(at::equal(one.grad_weight, all[0].grad_weight));
    EXPECT_TRUE(at::equal(one.running_var, all[0].running_var));
  }
}

TEST(NormPool, WhatItDoesNotTakeHasTheOperationsBits) {
  at::manual_seed(7);
  const at::Tensor x = images({3, 16, 8, 8});
  const auto norm = make_norm(16);
  const auto check = [&](const char* what, const at::Tensor& input, nn::BatchNorm2d module) {
    SCOPED_TRACE(what);
    EXPECT_FALSE(norm_relu_pool_is_fused(input, *module));
    auto copy = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(module->clone());
    const at::Tensor own = norm_relu_pool(input, *module);
    EXPECT_TRUE(at::equal(own, separately(input, *copy)));
    if (module->options.track_running_stats()) {
      EXPECT_TRUE(at::equal(module->running_mean, copy->running_mean));
    }
  };
  check("contiguous", x.contiguous(), norm);
  check("12 channels", images({3, 12, 8, 8}), make_norm(12));
  check("no statistics", x, nn::BatchNorm2d(nn::BatchNorm2dOptions(16).track_running_stats(false)));
  check("no parameters", x, nn::BatchNorm2d(nn::BatchNorm2dOptions(16).affine(false)));
  check("an average of all", x, nn::BatchNorm2d(nn::BatchNorm2dOptions(16).momentum(std::nullopt)));
  auto evaluated = make_norm(16);
  evaluated->eval();
  check("evaluation", x, evaluated);
  auto wide = make_norm(16);
  wide->to(at::kDouble);
  check("double", x.to(at::kDouble), wide);
}

TEST(NormPool, AFrozenInputGetsNoGradient) {
  at::manual_seed(8);
  const at::Tensor x = images({2, 8, 4, 4});
  auto norm = make_norm(8);
  norm_relu_pool(x, *norm).sum().backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_TRUE(norm->weight.grad().defined());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(norm_relu_pool(x, *norm).requires_grad());
}

TEST(NormPool, RefusesGradientsOfGradients) {
  const at::Tensor x = images({2, 8, 4, 4}).requires_grad_();
  auto norm = make_norm(8);
  const at::Tensor loss = norm_relu_pool(x, *norm).pow(2).sum();
  EXPECT_THROW(torch::autograd::grad({loss}, {x}, {}, std::nullopt, /*create_graph=*/true),
               UsageError);
}

TEST_P(Shapes, Bfloat16IsNoWorseThanTheOperations) {
  at::manual_seed(11);
  const at::Tensor x = images(GetParam(), 3, 2).to(at::kBFloat16);
  auto norm = make_norm(GetParam()[1]);
  auto other = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(norm->clone());
  const auto exact_norm = in_double(norm);
  ASSERT_TRUE(norm_relu_pool_is_fused(x, *norm));
  const Results exact = results_of(x.to(at::kDouble), *exact_norm, separately);
  const Results plain = results_of(x, *other, separately);
  const Results own = results_of(x, *norm, norm_relu_pool);
  EXPECT_EQ(own.out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(own.grad_x.scalar_type(), at::kBFloat16);
  // bfloat16 has 8 bits. A result rounded once is within half a unit of its last place, which is at
  // most 2^-8 of the largest.
  EXPECT_LE(difference(own.out, exact.out), 1. / 256);
  EXPECT_LT(difference(own.running_var, exact.running_var), 2e-6);
  // Where two of a window are equal in bfloat16, the operations choose by the rounded value.
  EXPECT_LT(difference(own.grad_bias, exact.grad_bias),
            difference(plain.grad_bias, exact.grad_bias) + 0.01);
  EXPECT_LT(difference(own.grad_weight, exact.grad_weight),
            difference(plain.grad_weight, exact.grad_weight) + 0.01);
  EXPECT_LT(difference(own.grad_x, exact.grad_x), difference(plain.grad_x, exact.grad_x) + 0.01);
}

TEST(NormPool, Bfloat16IsRoundedAsATensorIs) {
  at::manual_seed(12);
  const norm_pool::Image image{2, 2, 4096};
  at::Tensor x = at::randn({4, 4096}).mul(at::randn({4096}).mul(8).exp()).to(at::kBFloat16);
  x[2][5] = std::numeric_limits<double>::infinity();
  x[1][6] = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor scale = at::randn({4096}), shift = at::randn({4096});
  const at::Tensor pooled = at::empty({4096}, at::kBFloat16), chosen = at::empty_like(pooled);
  const at::Tensor place = at::empty({4096}, at::kByte);
  using Element = norm_pool::Bfloat16;
  norm_pool::kernels_plain.of_bfloat16.forward(
      image, static_cast<const Element*>(x.const_data_ptr()), scale.const_data_ptr<float>(),
      shift.const_data_ptr<float>(), static_cast<Element*>(pooled.mutable_data_ptr()),
      static_cast<Element*>(chosen.mutable_data_ptr()), place.mutable_data_ptr<uint8_t>());
  const at::Tensor exact = std::get<0>((x.to(at::kFloat) * scale + shift).clamp_min(0).max(0));
  EXPECT_TRUE(at::allclose(pooled, exact.to(at::kBFloat16), 0, 0, /*equal_nan=*/true));
  EXPECT_TRUE(pooled[6].isnan().item<bool>());
}

TEST(NormPool, EveryProcessorsKernelsAgree) {
  at::manual_seed(10);
  const norm_pool::Image image{7, 9, 16};
  const at::Tensor x = at::randn({7, 9, 16}), scale = at::randn({16}), shift = at::randn({16});
  const auto run = [&](const norm_pool::Kernels<float>& kernels) {
    const at::Tensor pooled = at::empty({3, 4, 16}), chosen = at::empty({3, 4, 16});
    const at::Tensor place = at::empty({3, 4, 16}, at::kByte), sums = at::empty({4, 16});
    const at::Tensor grad_x = at::empty({7, 9, 16});
    auto* to = sums.mutable_data_ptr<float>();
    kernels.moments(image, x.const_data_ptr<float>(), to, to + 16);
    kernels.forward(image, x.const_data_ptr<float>(), scale.const_data_ptr<float>(),
                    shift.const_data_ptr<float>(), pooled.mutable_data_ptr<float>(),
                    chosen.mutable_data_ptr<float>(), place.mutable_data_ptr<uint8_t>());
    kernels.sums(image, pooled.const_data_ptr<float>(), chosen.const_data_ptr<float>(),
                 place.const_data_ptr<uint8_t>(), to, to + 32, to + 48);
    kernels.backward(image, x.const_data_ptr<float>(), pooled.const_data_ptr<float>(),
                     place.const_data_ptr<uint8_t>(), scale.const_data_ptr<float>(),
                     shift.const_data_ptr<float>(), to, grad_x.mutable_data_ptr<float>());
    return std::vector<at::Tensor>{pooled, chosen, place.to(at::kFloat), sums, grad_x};
  };
  const auto plain = run(norm_pool::kernels_plain.of_float);
  const auto best = run(norm_pool::kernels().of_float);
  // A fused multiply-add rounds once where two operations round twice.
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_LT(difference(best[i], plain[i]), 1e-6) << i;
}

// Their memory holds other values than they have, or there is none.
TEST(NormPool, TakesTensorsThatAreNegatedLazilyAndZerosWithoutMemory) {
  const at::Tensor x = images({2, 8, 6, 4});
  nn::BatchNorm2d norm = make_norm(8), other(8);
  other->weight.set_data(norm->weight.detach().clone());
  other->bias.set_data(norm->bias.detach().clone());
  const at::Tensor negated = at::_neg_view(-x);
  ASSERT_TRUE(negated.is_neg() && negated.is_contiguous(at::MemoryFormat::ChannelsLast));
  const auto gradients = [&](nn::BatchNorm2d& used, const at::Tensor& given) {
    at::Tensor input = x.clone().requires_grad_();
    return torch::autograd::grad({norm_relu_pool(input, *used)}, {input}, {given})[0];
  };
  EXPECT_LT(difference(norm_relu_pool(negated, *norm), norm_relu_pool(x, *other)), 1e-5);
  const at::Tensor given = images({2, 8, 3, 2});
  const at::Tensor expected = gradients(norm, given);
  EXPECT_TRUE(at::equal(gradients(norm, at::_neg_view(-given)), expected));
  const at::Tensor zeros = at::_efficientzerotensor({2, 8, 3, 2}, at::kFloat);
  EXPECT_TRUE(at::equal(gradients(norm, zeros), at::zeros_like(x)));
}

}  // namespace norm_pool_test
}  // namespace lockstep
