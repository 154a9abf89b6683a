#include "lockstep/autograd/backward.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>

#include "lockstep/autograd/activation_checkpoint.h"
#include "lockstep/autograd/linear.h"

namespace lockstep {
namespace split_backward_test {

using Leaves = std::vector<at::Tensor>;
using Forward = std::function<at::Tensor(const Leaves&)>;

Leaves leaves(const std::vector<std::vector<int64_t>>& shapes) {
  at::manual_seed(1);
  Leaves made;
  for (const auto& shape : shapes) made.push_back(at::randn(shape).requires_grad_());
  return made;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

/// The input is leaf 0. Both ways, twice each so that gradients add up, give the same gradients;
/// between the halves only the input has one.
void expect_same_as_whole(const std::vector<std::vector<int64_t>>& shapes, const Forward& forward) {
  const Leaves whole = leaves(shapes), split = leaves(shapes);
  for (int time = 0; time < 2; ++time) {
    const at::Tensor output = forward(whole), again = forward(split);
    const at::Tensor gradient = at::linspace(-1, 2, output.numel()).reshape(output.sizes());
    backward(output, gradient);
    Leaves before;
    for (const at::Tensor& leaf : split) {
      before.push_back(leaf.grad().defined() ? leaf.grad().clone() : at::Tensor());
    }
    SplitBackward halves(again, gradient, split[0]);
    EXPECT_TRUE(same(split[0].grad(), whole[0].grad()));
    for (size_t i = 1; i < split.size(); ++i) EXPECT_TRUE(same(split[i].grad(), before[i])) << i;
    halves.finish();
    for (size_t i = 0; i < split.size(); ++i) {
      EXPECT_TRUE(whole[i].grad().defined());
      EXPECT_TRUE(same(split[i].grad(), whole[i].grad())) << i;
    }
  }
}

/// A checkpoint's backward gives its parameters their gradients each time that it runs.
TEST(SplitBackward, CheckpointsRunOnce) {
  const Leaves whole = leaves({{8, 5}, {7, 5}, {7, 7}}), split = leaves({{8, 5}, {7, 5}, {7, 7}});
  const auto forward = [](const Leaves& l) {
    const auto inner = [l](const at::Tensor& x) { return at::tanh(at::linear(x, l[1])); };
    return at::linear(checkpoint(inner, l[0]), l[2]).square().sum();
  };
  backward(forward(whole));
  SplitBackward halves(forward(split), {}, split[0]);
  EXPECT_TRUE(same(split[0].grad(), whole[0].grad()));
  halves.finish();
  for (size_t i = 0; i < split.size(); ++i)
    EXPECT_TRUE(same(split[i].grad(), whole[i].grad())) << i;
}

TEST(SplitBackward, LinearLayers) {
  expect_same_as_whole({{8, 5}, {7, 5}, {7}, {3, 7}, {3}}, [](const Leaves& l) {
    return linear(at::relu(linear(l[0], l[1], l[2])), l[3], l[4]);
  });
  expect_same_as_whole({{2, 8, 5}, {7, 5}, {7}},
                       [](const Leaves& l) { return at::tanh(at::linear(l[0], l[1], l[2])); });
}

TEST(SplitBackward, ConvolutionAndNorms) {
  expect_same_as_whole({{2, 3, 8, 8}, {4, 3, 3, 3}, {4}, {4}, {4}}, [](const Leaves& l) {
    const at::Tensor x = at::conv2d(l[0], l[1], l[2], 1, 1);
    return at::max_pool2d(at::batch_norm(x, l[3], l[4], {}, {}, true, 0.1, 1e-5, false), {2, 2});
  });
  expect_same_as_whole({{4, 6}, {6}, {6}},
                       [](const Leaves& l) { return at::layer_norm(l[0], {6}, l[1], l[2]); });
}

TEST(SplitBackward, AWeightUsedTwiceAndOneMadeOfAnother) {
  expect_same_as_whole({{4, 5}, {5, 5}, {5}}, [](const Leaves& l) {
    const at::Tensor weight = l[1] * 2;
    return linear(at::relu(linear(l[0], weight, l[2])), weight, l[2]) + l[0];
  });
}

TEST(SplitBackward, Attention) {
  expect_same_as_whole({{2, 4, 6}, {18, 6}, {18}, {6, 6}}, [](const Leaves& l) {
    const auto parts = at::linear(l[0], l[1], l[2]).split(6, -1);
    const at::Tensor scores = at::softmax(at::bmm(parts[0], parts[1].transpose(1, 2)), -1);
    return l[0] + at::matmul(at::bmm(scores, parts[2]), l[3]);
  });
}

TEST(SplitBackward, EachHalfDoesItsOwnProductsOnly) {
  struct Probe : torch::autograd::Function<Probe> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              const at::Tensor& w) {
      return x + w;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list gradients) {
      return {gradients[0], gradients[0]};
    }
  };
  // A weight's own history belongs to the second half.
  Leaves l = leaves({{3}, {3}});
  SplitBackward halves(Probe::apply(l[0], l[1] * 3).sum(), {}, l[0]);
  EXPECT_TRUE(at::equal(l[0].grad(), at::ones({3})));
  EXPECT_FALSE(l[1].grad().defined());
  halves.finish();
  EXPECT_TRUE(at::equal(l[1].grad(), at::full({3}, 3.0)));
}

TEST(SplitBackward, WithoutAnInputToWaitForAllIsDoneAtTheEnd) {
  Leaves l = leaves({{3}, {3}, {3}});
  SplitBackward no_input((l[1] * 2).sum(), {}, at::Tensor());
  EXPECT_FALSE(l[1].grad().defined());
  no_input.finish();
  EXPECT_TRUE(at::equal(l[1].grad(), at::full({3}, 2.0)));
  SplitBackward other((l[2] * 4).sum(), {}, l[0]);
  EXPECT_FALSE(l[2].grad().defined());
  other.finish();
  EXPECT_TRUE(at::equal(l[2].grad(), at::full({3}, 4.0)));
  EXPECT_FALSE(l[0].grad().defined());
}

TEST(SplitBackward, AGraphWithHooksGoesToTheEngineAtOnce) {
  Leaves l = leaves({{3}, {3}});
  int calls = 0;
  const at::Tensor product = l[0] * l[1];
  product.register_hook([&](const at::Tensor&) { ++calls; });
  SplitBackward halves(product.sum(), {}, l[0]);
  EXPECT_TRUE(l[1].grad().defined());
  halves.finish();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(l[0].grad(), l[1].detach()));
}

}  // namespace split_backward_test
}  // namespace lockstep
