#include "lockstep/optim/optim.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep {
namespace optim_test {

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

TEST(UniqueParameters, KeepTheOrderOfTheFirstPlaces) {
  const at::Tensor a = at::ones({2}), b = at::ones({2}), undefined;
  const auto unique = unique_parameters({b, a, b, undefined, a, undefined});
  ASSERT_EQ(unique.size(), 4U);
  EXPECT_TRUE(unique[0].is_same(b));
  EXPECT_TRUE(unique[1].is_same(a));
}

TEST(UniqueParameters, AreSteppedAndClippedOnce) {
  for (const std::string& name : optimizer_names()) {
    const OptimizerOptions options{.lr = 0.1, .momentum = name == "sgd" ? 0.9 : 0};
    at::Tensor once = at::ones({3}).requires_grad_(), twice = at::ones({3}).requires_grad_();
    const auto alone = make_optimizer(name, {once}, options);
    const auto tied = make_optimizer(name, {twice, twice}, options);
    EXPECT_EQ(tied->parameters().size(), 1U);
    for (int step = 0; step < 2; ++step) {
      once.mutable_grad() = at::full({3}, 2.0);
      twice.mutable_grad() = at::full({3}, 2.0);
      EXPECT_EQ(clip_grad_norm({once}, 1), clip_grad_norm({twice, twice}, 1));
      if (tied->needs_closure()) {
        alone->step_with([] { return 1.0; });
        tied->step_with([] { return 1.0; });
      } else {
        alone->step();
        tied->step();
      }
    }
    EXPECT_TRUE(at::equal(once, twice)) << name;
  }
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
  StateDict state = adam->state();
  for (auto& [key, tensor] : state) tensor = tensor.clone();
  StateDict without;
  for (const auto& entry : state) {
    if (entry.first != "exp_avg_sq.1") without.push_back(entry);
  }
  try {
    adam->load_state(without);
    FAIL() << "accepted";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("exp_avg_sq.1"), std::string::npos) << error.what();
  }
  const StateDict after = adam->state();
  ASSERT_EQ(after.size(), state.size());
  for (size_t i = 0; i < state.size(); ++i)
    EXPECT_TRUE(at::equal(after[i].second, state[i].second));
}

/// LibTorch's adagrad has entries from its construction, which `state` does not give.
TEST(Optimizers, AParameterWithoutAGradientHasNoState) {
  for (const std::string& name : optimizer_names()) {
    if (name == "lbfgs") continue;  // Its state is of all parameters together.
    auto all = parameters();
    const auto optimizer = make_optimizer(name, all, {.momentum = 0.9});
    EXPECT_TRUE(optimizer->state().empty()) << name;
    all[0].mutable_grad() = at::ones({4});
    optimizer->step();
    EXPECT_FALSE(optimizer->state().empty()) << name;
    for (const auto& [key, tensor] : optimizer->state()) EXPECT_TRUE(key.ends_with(".0")) << key;
  }
}

TEST(Optimizers, AnEmptyStateIsThatOfAFreshOptimizer) {
  for (const std::string& name : optimizer_names()) {
    auto used = parameters(), fresh = parameters();
    const OptimizerOptions options{.lr = 0.1, .momentum = 0.9};
    const auto stepped = make_optimizer(name, used, options);
    const auto step = [](Optimizer& optimizer) {
      give_gradients(optimizer.parameters());
      optimizer.step_with([] { return 1.0; });
    };
    step(*stepped);
    for (size_t i = 0; i < used.size(); ++i) used[i].detach().copy_(fresh[i].detach());
    stepped->load_state({});
    EXPECT_TRUE(stepped->state().empty()) << name;
    step(*stepped);
    step(*make_optimizer(name, fresh, options));
    for (size_t i = 0; i < used.size(); ++i) EXPECT_TRUE(at::equal(used[i], fresh[i])) << name;
  }
}

/// An option that decides whether an optimizer keeps a buffer.
struct Switch {
  std::string optimizer;
  std::string buffer;
  OptimizerOptions on;
};

std::vector<Switch> switches() {
  return {{"sgd", "momentum_buffer", {.momentum = 0.9}},
          {"rmsprop", "momentum_buffer", {.momentum = 0.9}},
          {"rmsprop", "grad_avg", {.centered = true}},
          {"adam", "max_exp_avg_sq", {.amsgrad = true}},
          {"adamw", "max_exp_avg_sq", {.amsgrad = true}}};
}

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return names;
}

TEST(Optimizers, AStateIsTakenWithABufferMoreOrLess) {
  for (const auto dtype : {at::kFloat, at::kHalf}) {  // LibTorch's adam has the latter.
    for (const Switch& of : switches()) {
      const at::Tensor parameter = at::ones({4}).to(dtype).requires_grad_();
      const auto stepped = [&](const OptimizerOptions& options, const StateDict& state) {
        auto optimizer = make_optimizer(of.optimizer, {parameter}, options);
        if (!state.empty()) optimizer->load_state(state);
        parameter.mutable_grad() = at::ones_like(parameter);
        optimizer->step();
        return optimizer;
      };
      const std::string what = of.optimizer + " " + of.buffer;
      const auto without = stepped({}, {}), with = stepped(of.on, {});
      EXPECT_EQ(names_of(with->state()).size(), names_of(without->state()).size() + 1) << what;
      EXPECT_EQ(names_of(stepped(of.on, without->state())->state()), names_of(with->state()))
          << what;
      const auto dropped = make_optimizer(of.optimizer, {parameter}, {});
      dropped->load_state(with->state());
      EXPECT_EQ(names_of(dropped->state()), names_of(without->state())) << what;
    }
  }
}

/// As in a fresh optimizer: zeros. SGD's first gradient becomes its buffer.
TEST(Optimizers, ANewlyNeededBufferStartsAsInAFreshOptimizer) {
  for (const auto dtype : {at::kFloat, at::kHalf}) {
    for (const Switch& of : switches()) {
      const at::Tensor parameter = at::ones({4}).to(dtype).requires_grad_();
      parameter.mutable_grad() = at::ones_like(parameter);
      const auto without = make_optimizer(of.optimizer, {parameter}, {});
      without->step();
      const auto with = make_optimizer(of.optimizer, {parameter}, of.on);
      with->load_state(without->state());
      for (const auto& [name, tensor] : with->state()) {
        if (!name.starts_with(of.buffer)) continue;
        EXPECT_TRUE(at::equal(tensor, at::zeros_like(tensor))) << of.optimizer << " " << name;
      }
      EXPECT_EQ(with->state().empty(), of.optimizer == "sgd");
    }
  }
}

TEST(Optimizers, ABufferThatOnlySomeParametersHaveIsADamagedState) {
  for (const auto dtype : {at::kFloat, at::kHalf}) {
    for (const Switch& of : switches()) {
      if (of.optimizer == "sgd") continue;  // Nothing tells which parameters had a gradient.
      std::vector<at::Tensor> all;
      for (int i = 0; i < 2; ++i) {
        all.push_back(at::ones({4}).to(dtype).requires_grad_());
        all.back().mutable_grad() = at::ones_like(all.back());
      }
      const auto optimizer = make_optimizer(of.optimizer, all, of.on);
      optimizer->step();
      StateDict damaged;
      for (const auto& entry : optimizer->state()) {
        if (entry.first != of.buffer + ".1") damaged.push_back(entry);
      }
      EXPECT_THAT([&] { optimizer->load_state(damaged); },
                  ::testing::ThrowsMessage<CheckpointError>(
                      ::testing::HasSubstr("lacks '" + of.buffer + ".1'")));
    }
  }
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

}  // namespace optim_test
}  // namespace lockstep
