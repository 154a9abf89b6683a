#include "lockstep/optim/averaged_model.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace averaged_model_test {

struct Net : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::zeros({2}));
  at::Tensor statistics = register_buffer("statistics", at::zeros({1}));
  at::Tensor count = register_buffer("count", at::zeros({1}, at::kLong));

  void set(double value) {
    const c10::AutoGradMode no_grad(false);
    weight.fill_(value);
    statistics.fill_(value);
    count.fill_(value);
  }
};

double first(const at::Tensor& tensor) {
  return tensor.reshape({-1})[0].item<double>();
}

TEST(AveragedModel, MovesExponentially) {
  Net net;
  AveragedModel average(net, {.decay = 0.75});
  net.set(4);
  average.update_parameters();
  EXPECT_EQ(first(average.averages()[0]), 4) << "the first update copies";
  net.set(8);
  average.update_parameters();
  EXPECT_EQ(first(average.averages()[0]), 5);
  EXPECT_EQ(first(average.averages()[1]), 8) << "buffers are the newest";
  EXPECT_EQ(average.n_averaged(), 2);
}

TEST(AveragedModel, IsThePlainMeanWithoutADecay) {
  Net net;
  AveragedModel average(net, {.decay = std::nullopt, .use_buffers = true});
  for (const double value : {3, 5, 10}) {
    net.set(value);
    average.update_parameters();
  }
  for (const at::Tensor& tensor : average.averages()) EXPECT_EQ(first(tensor), 6);
}

TEST(AveragedModel, SwapsInAndBack) {
  Net net;
  AveragedModel average(net, {.decay = 0.5});
  EXPECT_THROW((void)average.swapped_in(), UsageError);
  net.set(2);
  average.update_parameters();
  net.set(4);
  average.update_parameters();
  {
    const auto swapped = average.swapped_in();
    EXPECT_EQ(first(net.weight), 3);
  }
  EXPECT_EQ(first(net.weight), 4);
  EXPECT_EQ(first(average.averages()[0]), 3);
  average.copy_to_module();
  EXPECT_EQ(first(net.weight), 3);
}

/// Two names of one tensor, as of an embedding that is the output layer too.
struct TiedNet : torch::nn::Module {
  TiedNet() { register_parameter("again", weight); }
  at::Tensor weight = register_parameter("weight", at::zeros({2}));
};

TEST(AveragedModel, ATensorOfTwoNamesIsOne) {
  TiedNet net;
  AveragedModel average(net, {.decay = 0.5});
  for (const double value : {2, 4}) {
    const c10::AutoGradMode no_grad(false);
    net.weight.fill_(value);
    average.update_parameters();
  }
  {
    const auto swapped = average.swapped_in();
    EXPECT_EQ(first(net.weight), 3);
  }
  EXPECT_EQ(first(net.weight), 4) << "the weights come back";
  ASSERT_EQ(average.averages().size(), 2) << "one for each name";
  for (const at::Tensor& tensor : average.averages()) EXPECT_EQ(first(tensor), 3);
  AveragedModel other(net, {.decay = 0.5});
  other.load_state_dict(average.state_dict());
  other.copy_to_module();
  EXPECT_EQ(first(net.weight), 3);
}

TEST(AveragedModel, WhileItIsSwappedInNothingElseMayBeDone) {
  Net net;
  AveragedModel average(net, {.decay = 0.5});
  net.set(2);
  average.update_parameters();
  const auto swapped = average.swapped_in();
  const auto refused = ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("swapped in"));
  EXPECT_THAT([&] { (void)average.swapped_in(); }, refused);
  EXPECT_THAT([&] { average.update_parameters(); }, refused);
  EXPECT_THAT([&] { average.copy_to_module(); }, refused);
  EXPECT_THAT([&] { (void)average.state_dict(); }, refused);
}

TEST(AveragedModel, GoesOnFromItsState) {
  Net net;
  AveragedModel one(net, {.decay = 0.9}), other(net, {.decay = 0.9});
  for (const double value : {1, 2, 5}) {
    net.set(value);
    one.update_parameters();
  }
  other.load_state_dict(one.state_dict());
  StateDict of_python = one.state_dict();
  for (auto& [name, tensor] : of_python) {
    if (name == "n_averaged") tensor = tensor.reshape({});
  }
  AveragedModel third(net, {.decay = 0.9});
  third.load_state_dict(of_python);
  EXPECT_EQ(third.n_averaged(), 3);
  net.set(7);
  one.update_parameters();
  other.update_parameters();
  EXPECT_TRUE(at::equal(one.averages()[0], other.averages()[0]));
  auto damaged = one.state_dict();
  damaged.pop_back();
  EXPECT_THAT([&] { other.load_state_dict(damaged); },
              ::testing::ThrowsMessage<CheckpointError>(::testing::HasSubstr("module.count")));
}

TEST(AveragedModel, RefusesADecayOutOfRange) {
  Net net;
  for (const double decay : {-0.1, 1.5}) {
    EXPECT_THROW(AveragedModel(net, {.decay = decay}), UsageError);
  }
}

}  // namespace averaged_model_test
}  // namespace lockstep
