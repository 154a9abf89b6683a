#include "lockstep/autograd/linear.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <string>

namespace lockstep {
namespace linear_test {

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.sizes() != b.sizes() || a.strides() != b.strides() || a.dtype() != b.dtype()) return false;
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

struct Layer {
  at::Tensor x, weight, bias;

  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> all{x, weight};
    if (bias.defined()) all.push_back(bias);
    return all;
  }
  Layer copy() const {
    const auto leaf = [](const at::Tensor& from) {
      return from.defined() ? from.detach().clone().requires_grad_(from.requires_grad()) : from;
    };
    return {leaf(x), leaf(weight), leaf(bias)};
  }
};

Layer layer(int64_t rows, int64_t in, int64_t out, at::ScalarType dtype = at::kFloat) {
  return {at::randn({rows, in}, dtype).requires_grad_(),
          at::randn({out, in}, dtype).requires_grad_(), at::randn({out}, dtype).requires_grad_()};
}

/// The same values and gradients as at::linear's, also of gradients.
void expect_alike(const Layer& given) {
  const Layer ours = given.copy(), theirs = given.copy();
  const at::Tensor a = linear(ours.x, ours.weight, ours.bias);
  const at::Tensor b = at::linear(theirs.x, theirs.weight, theirs.bias);
  EXPECT_TRUE(same_bits(a, b));
  if (!b.requires_grad()) return;
  const at::Tensor direction = at::randn_like(b.detach());
  (a * a * direction).sum().backward();
  (b * b * direction).sum().backward();
  for (size_t i = 0; i < ours.leaves().size(); ++i)
    EXPECT_TRUE(same_bits(ours.leaves()[i].grad(), theirs.leaves()[i].grad())) << i;
}

TEST(Linear, HasTheBitsOfLibTorch) {
  at::manual_seed(1);
  for (const int64_t rows : {2, 3, 32, 65})
    for (const int64_t in : {2, 20, 784})
      for (const int64_t out : {1, 2, 10, 128}) {
        SCOPED_TRACE(std::to_string(rows) + " " + std::to_string(in) + " " + std::to_string(out));
        const Layer given = layer(rows, in, out);
        EXPECT_TRUE(linear_is_one_node(given.x, given.weight, given.bias));
        expect_alike(given);
        expect_alike(layer(rows, in, out, at::kDouble));
      }
}

/// Buckets follow it, and with them the bits of three ranks over Gloo.
TEST(Linear, GradientsComeInLibTorchsOrder) {
  using torch::autograd::variable_list;
  struct Note : torch::autograd::FunctionPostHook {
    Note(std::string& to, char letter) : to_(to), letter_(letter) {}
    variable_list operator()(const variable_list& outputs, const variable_list&) override {
      to_ += letter_;
      return outputs;
    }
    std::string& to_;
    char letter_;
  };
  const auto order = [](bool ours) {
    at::manual_seed(6);
    const auto apply = [&](const Layer& layer, const at::Tensor& x) {
      return ours ? linear(x, layer.weight, layer.bias) : at::linear(x, layer.weight, layer.bias);
    };
    std::vector<Layer> layers{layer(8, 6, 5), layer(8, 5, 4), layer(8, 4, 3)};
    std::string letters;
    std::vector<decltype(torch::autograd::impl::grad_accumulator(layers[0].x))> held;
    char letter = 'a';
    for (const Layer& one : layers)
      for (const at::Tensor& leaf : {one.weight, one.bias}) {
        held.push_back(torch::autograd::impl::grad_accumulator(leaf));
        held.back()->add_post_hook(std::make_unique<Note>(letters, letter++));
      }
    at::Tensor x = at::randn({8, 6});
    for (const Layer& one : layers) x = at::relu(apply(one, x));
    x.sum().backward();
    return letters;
  };
  EXPECT_EQ(order(true), order(false));
  EXPECT_EQ(order(false), "fedcba");
}

TEST(Linear, GivesGradientsOnlyWhereTheyAreWanted) {
  at::manual_seed(2);
  for (int wanted = 0; wanted < 8; ++wanted) {
    Layer given = layer(4, 6, 5);
    given.x.requires_grad_((wanted & 1) != 0);
    given.weight.requires_grad_((wanted & 2) != 0);
    given.bias.requires_grad_((wanted & 4) != 0);
    EXPECT_EQ(linear_is_one_node(given.x, given.weight, given.bias), wanted != 0);
    expect_alike(given);
  }
}

TEST(Linear, EverythingElseIsLibTorchs) {
  at::manual_seed(3);
  const auto expect_other = [](const Layer& given) {
    EXPECT_FALSE(linear_is_one_node(given.x, given.weight, given.bias));
    expect_alike(given);
  };
  expect_other(layer(1, 6, 5));
  expect_other(layer(6, 1, 5));
  expect_other(layer(4, 6, 5, at::kBFloat16));
  Layer given = layer(4, 6, 5);
  given.bias = at::Tensor();
  expect_other(given);
  given = layer(4, 6, 5);
  given.x = at::randn({2, 4, 6}).requires_grad_();
  expect_other(given);
  const at::NoGradGuard no_grad;
  expect_other(layer(4, 6, 5));
}

TEST(Linear, StridedInputs) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({6, 4}).t(), weight = at::randn({6, 5}).t().requires_grad_();
  EXPECT_FALSE(linear_is_one_node(x, weight, at::randn({5})));
  EXPECT_TRUE(same_bits(linear(x, weight, at::ones({5})), at::linear(x, weight, at::ones({5}))));
}

TEST(Linear, GradientsOfGradients) {
  at::manual_seed(5);
  std::vector<at::Tensor> seconds;
  const Layer given = layer(4, 6, 5);
  for (const bool ours : {true, false}) {
    const Layer copy = given.copy();
    const at::Tensor y =
        ours ? linear(copy.x, copy.weight, copy.bias) : at::linear(copy.x, copy.weight, copy.bias);
    const auto first = torch::autograd::grad({y.square().sum()}, {copy.x}, {}, true, true);
    first[0].square().sum().backward();
    seconds.push_back(copy.weight.grad());
  }
  // Sums of some ten terms, which the two graphs add in different orders.
  EXPECT_TRUE(at::allclose(seconds[0], seconds[1], 1e-5, 1e-6));
}

TEST(Linear, AChangedWeightIsNoticed) {
  const auto what = [](bool ours) -> std::string {
    const Layer given = layer(4, 6, 5);
    const at::Tensor y = ours ? linear(given.x, given.weight, given.bias)
                              : at::linear(given.x, given.weight, given.bias);
    {
      const at::NoGradGuard no_grad;
      given.weight.add_(1);
    }
    try {
      y.sum().backward();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "nothing";
  };
  EXPECT_NE(what(true).find("modified by an inplace operation"), std::string::npos) << what(true);
  EXPECT_NE(what(false).find("modified by an inplace operation"), std::string::npos);
}

TEST(Linear, AGraphIsUsedUpByBackward) {
  const Layer given = layer(4, 6, 5);
  const at::Tensor y = linear(given.x, given.weight, given.bias).sum();
  y.backward();
  EXPECT_THROW(y.backward(), c10::Error);
}

}  // namespace linear_test
}  // namespace lockstep
