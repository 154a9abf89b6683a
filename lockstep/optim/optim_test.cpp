#include "lockstep/optim/optim.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

std::vector<at::Tensor> parameters() {
  return {at::ones({4}).requires_grad_(), at::full({2, 3}, -2.0).requires_grad_()};
}

void give_gradients(const std::vector<at::Tensor>& all) {
  for (const at::Tensor& parameter : all) {
    parameter.mutable_grad() = at::linspace(-1, 2, parameter.numel()).view(parameter.sizes());
  }
}

/// Minimises sum (p - 3)^2.
double loss_after(const std::string& name, int steps, double lr) {
  auto all = parameters();
  OptimizerOptions options;
  options.lr = lr;
  auto optimizer = make_optimizer(name, all, options);
  double last = 0;
  for (int step = 0; step < steps; ++step) {
    last = optimizer->step_with([&] {
      zero_grad(all);
      at::Tensor loss = (all[0] - 3).square().sum() + (all[1] - 3).square().sum();
      loss.backward();
      return loss.item<double>();
    });
  }
  return last;
}

TEST(Optimizers, EachOneMinimises) {
  for (const std::string& name : optimizer_names()) {
    EXPECT_LT(loss_after(name, 400, name == "adagrad" ? 1.0 : 0.1), 0.1) << name;
  }
}

TEST(Optimizers, NameAndRate) {
  for (const std::string& name : optimizer_names()) {
    OptimizerOptions options;
    options.lr = 0.25;
    auto optimizer = make_optimizer(name, parameters(), options);
    EXPECT_EQ(optimizer->name(), name);
    EXPECT_EQ(optimizer->lr(), 0.25);
    optimizer->set_lr(0.5);
    EXPECT_EQ(optimizer->lr(), 0.5);
    EXPECT_GT(default_learning_rate(name), 0);
  }
}

TEST(Optimizers, ARateOfZeroChangesNothing) {
  for (const std::string& name : optimizer_names()) {
    auto all = parameters();
    auto optimizer = make_optimizer(name, all, {});
    optimizer->set_lr(0);
    optimizer->step_with([&] {
      give_gradients(all);
      return 1.0;
    });
    EXPECT_TRUE(at::equal(all[0].detach(), at::ones({4}))) << name;
  }
}

TEST(Optimizers, StateOfAnotherOptimizerIsRefused) {
  auto all = parameters();
  give_gradients(all);
  auto adam = make_optimizer("adam", all, {});
  adam->step();
  for (const std::string name : {"sgd", "rmsprop", "adagrad"}) {
    EXPECT_THROW(make_optimizer(name, all, {})->load_state(adam->state()), CheckpointError) << name;
  }
}

TEST(Optimizers, ADamagedStateIsRefusedAndChangesNothing) {
  auto all = parameters();
  give_gradients(all);
  auto adam = make_optimizer("adam", all, {});
  adam->step();
  OptimizerState state = adam->state();
  for (auto& [key, tensor] : state) tensor = tensor.clone();
  OptimizerState without;
  for (const auto& entry : state) {
    if (entry.first != "exp_avg_sq.1") without.push_back(entry);
  }
  try {
    adam->load_state(without);
    FAIL() << "accepted";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("exp_avg_sq.1"), std::string::npos) << error.what();
  }
  const OptimizerState after = adam->state();
  ASSERT_EQ(after.size(), state.size());
  for (size_t i = 0; i < state.size(); ++i)
    EXPECT_TRUE(at::equal(after[i].second, state[i].second));
}

TEST(Optimizers, BadOptionsAreUsageErrors) {
  EXPECT_THROW(make_optimizer("sgd", {}, {}), UsageError);
  EXPECT_THROW(make_optimizer("sgd", parameters(), {.lr = -1}), UsageError);
  EXPECT_THROW(make_optimizer("sgd", parameters(), {.momentum = -0.1}), UsageError);
  EXPECT_THROW(make_optimizer("sgd", parameters(), {.nesterov = true}), UsageError);
  EXPECT_THROW(
      make_optimizer("sgd", parameters(), {.momentum = 0.9, .nesterov = true, .dampening = 0.1}),
      UsageError);
  EXPECT_THROW(make_optimizer("adam", parameters(), {.beta1 = 1}), UsageError);
  EXPECT_THROW(make_optimizer("adam", parameters(), {.eps = -1}), UsageError);
  try {
    make_optimizer("adamm", parameters(), {});
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("adam"), std::string::npos) << error.what();
  }
}

TEST(ZeroGrad, DropsGradientsWithoutTouchingWhatTheyShare) {
  at::Tensor flat = at::ones({10});
  auto all = parameters();
  all[0].mutable_grad() = flat.narrow(0, 0, 4);
  zero_grad(all);
  EXPECT_FALSE(all[0].grad().defined());
  EXPECT_TRUE(at::equal(flat, at::ones({10})));
}

}  // namespace
}  // namespace lockstep
