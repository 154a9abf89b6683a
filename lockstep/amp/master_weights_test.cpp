#include "lockstep/amp/precision.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"
#include "tests/support/plain_optimizers.h"
#include "tests/support/run_group.h"

namespace lockstep {
namespace master_weights_test {

using test::run_group;

OptimizerFactory factory(const std::string& name, double lr) {
  return [=](std::vector<at::Tensor> parameters) {
    return make_optimizer(name, std::move(parameters), {.lr = lr});
  };
}

at::Tensor leaf(const at::Tensor& value, at::ScalarType dtype) {
  return value.to(dtype).detach().clone().requires_grad_();
}

void set_gradient(const at::Tensor& parameter, const at::Tensor& value) {
  parameter.mutable_grad() = value.to(parameter.scalar_type());
}

TEST(MasterWeights, UpdatesTooSmallFor16BitsAddUp) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor plain = leaf(at::ones({3}), dtype), kept = leaf(at::ones({3}), dtype);
    const auto without = make_optimizer("sgd", {plain}, {.lr = 1});
    MasterWeights with({kept}, factory("sgd", 1));
    for (int i = 0; i < 64; ++i) {
      for (const at::Tensor& parameter : {plain, kept}) {
        set_gradient(parameter, at::full({3}, -std::ldexp(1., -13)));
      }
      without->step();
      with.step();
    }
    EXPECT_EQ(plain[0].item<double>(), 1);
    EXPECT_EQ(kept[0].item<double>(), 1 + std::ldexp(1., -7));
  }
}

TEST(MasterWeights, HasTheBitsOfFloat32WithTheSameGradients) {
  at::manual_seed(0);
  for (const std::string& name : test::plain_optimizers()) {
    const at::Tensor start = at::randn({5, 7}).to(at::kHalf);
    const at::Tensor half = leaf(start, at::kHalf), full = leaf(start, at::kFloat);
    const at::Tensor norm = leaf(at::ones({7}), at::kFloat), norm2 = leaf(norm, at::kFloat);
    MasterWeights masters({half, norm}, factory(name, 0.01));
    const auto plain = make_optimizer(name, {full, norm2}, {.lr = 0.01});
    for (int i = 0; i < 3; ++i) {
      const at::Tensor gradient = at::randn({5, 7}).to(at::kHalf), other = at::randn({7});
      set_gradient(half, gradient * 1024);
      set_gradient(full, gradient);
      set_gradient(norm, other * 1024);
      set_gradient(norm2, other);
      masters.step_scaled({at::full({}, 1024.F), {}});
      plain->step();
    }
    EXPECT_TRUE(at::equal(masters.master_parameters()[0], full)) << name;
    EXPECT_TRUE(at::equal(half, full.to(at::kHalf))) << name;
    EXPECT_TRUE(at::equal(norm, norm2)) << name;
    EXPECT_EQ(masters.master_parameters()[1].unsafeGetTensorImpl(), norm.unsafeGetTensorImpl());
  }
}

TEST(MasterWeights, SkipsWhatTheScalerForbids) {
  const at::Tensor weight = leaf(at::ones({3}), at::kHalf);
  MasterWeights optimizer({weight}, factory("adam", 0.1));
  set_gradient(weight, at::ones({3}));
  optimizer.step_scaled({at::full({}, 8.F), at::ones({})});
  EXPECT_EQ(weight[0].item<double>(), 1);
  EXPECT_EQ(optimizer.state().size(), 1u) << "the step was counted";
}

TEST(MasterWeights, WhatOthersChangedWins) {
  const at::Tensor weight = leaf(at::ones({2}), at::kBFloat16);
  MasterWeights optimizer({weight}, factory("sgd", 1));
  set_gradient(weight, at::full({2}, std::ldexp(1., -12)));
  optimizer.step();  // too small to show
  const double kept = 1 - std::ldexp(1., -12);
  EXPECT_EQ(optimizer.master_parameters()[0][1].item<double>(), kept);
  {
    const c10::AutoGradMode no_grad(false);
    weight[0].fill_(5);
  }
  set_gradient(weight, at::zeros({2}));
  optimizer.step();
  EXPECT_EQ(weight[0].item<double>(), 5);
  EXPECT_EQ(optimizer.master_parameters()[0][1].item<double>(), kept) << "an unchanged element";
}

/// Collectives write to a tensor's memory without a trace in its count of changes.
TEST(MasterWeights, WhatACollectiveChangedWins) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    run_group(2,
              [&](const ProcessGroup& group) {
                // More than what is compared at once.
                const at::Tensor weight = leaf(at::full({300'001}, 1.0 + group.rank()), dtype);
                MasterWeights optimizer({weight}, factory("sgd", 1));
                const auto step = [&] {
                  set_gradient(weight, at::zeros_like(weight));
                  optimizer.step();
                };
                step();
                at::Tensor detached = weight.detach();
                group.broadcast(detached, 0);
                step();
                EXPECT_TRUE(weight.eq(1).all().item<bool>()) << "the broadcast was lost";
                {
                  const c10::AutoGradMode no_grad(false);
                  weight[300'000].fill_(3 + group.rank());
                }
                step();
                group.all_reduce(detached, ReduceOp::avg);
                step();
                EXPECT_EQ(weight[300'000].item<double>(), 3.5) << "the average was lost";
              },
              {.backend = "shm"});
  }
}

TEST(MasterWeights, ChangesOfAnyLayoutWin) {
  const at::Tensor square = at::ones({6, 4}).to(at::kHalf);
  for (const at::Tensor& start : {square.t(), square.slice(1, 0, 4, 2), at::ones({}).to(at::kHalf),
                                  at::ones({0}).to(at::kHalf)}) {
    const at::Tensor weight = start.detach().requires_grad_();
    MasterWeights optimizer({weight}, factory("sgd", 1));
    set_gradient(weight, at::zeros_like(weight));
    optimizer.step();
    {
      const c10::AutoGradMode no_grad(false);
      weight.detach().fill_(2);
    }
    optimizer.step();
    EXPECT_TRUE(weight.eq(2).all().item<bool>());
    EXPECT_TRUE(optimizer.master_parameters()[0].eq(2).all().item<bool>());
  }
}

TEST(MasterWeights, AStateWithoutCopiesTakesThemFromTheParameters) {
  const at::Tensor weight = leaf(at::ones({2}), at::kBFloat16);
  MasterWeights optimizer({weight}, factory("sgd", 1));
  set_gradient(weight, at::full({2}, std::ldexp(1., -12)));
  optimizer.step();  // too small to show
  EXPECT_NE(optimizer.master_parameters()[0][0].item<double>(), 1);
  optimizer.load_state({});
  EXPECT_EQ(optimizer.master_parameters()[0][0].item<double>(), 1);
}

TEST(MasterWeights, GoesOnFromItsState) {
  at::manual_seed(1);
  const at::Tensor start = at::randn({9});
  const at::Tensor a = leaf(start, at::kHalf), b = leaf(at::zeros({9}), at::kHalf);
  MasterWeights first({a}, factory("adam", 0.01)), second({b}, factory("adam", 0.01));
  const auto step = [](MasterWeights& optimizer, double gradient) {
    set_gradient(optimizer.parameters()[0], at::full({9}, gradient));
    optimizer.step();
  };
  step(first, 0.5);
  for (const auto& [name, tensor] : first.state()) {
    EXPECT_NE(tensor.scalar_type(), at::kHalf) << name;
  }
  second.load_state(first.state());
  EXPECT_TRUE(at::equal(a, b)) << "the copies were not rounded into the parameters";
  step(first, -0.25);
  step(second, -0.25);
  EXPECT_TRUE(at::equal(first.master_parameters()[0], second.master_parameters()[0]));
}

TEST(MasterWeights, TakesTheStateOfARunInFloat32) {
  const at::Tensor full = leaf(at::ones({2}), at::kFloat), half = leaf(at::ones({2}), at::kHalf);
  const auto plain = make_optimizer("adam", {full}, {.lr = 0.5});
  set_gradient(full, at::ones({2}));
  plain->step();
  {
    const c10::AutoGradMode no_grad(false);
    half.copy_(full);  // as loading the model's state does
  }
  MasterWeights masters({half}, factory("adam", 0.5));
  masters.load_state(plain->state());
  for (const at::Tensor& parameter : {full, half}) set_gradient(parameter, at::ones({2}));
  plain->step();
  masters.step();
  EXPECT_NEAR(half[0].item<double>(), full[0].item<double>(), 1e-3);
}

TEST(MasterWeights, RefusesAStateThatLacksACopy) {
  const at::Tensor a = leaf(at::ones({2}), at::kHalf), b = leaf(at::ones({2}), at::kHalf);
  MasterWeights optimizer({a, b}, factory("sgd", 1));
  auto state = optimizer.state();
  state.pop_back();
  EXPECT_THAT([&] { optimizer.load_state(state); },
              ::testing::ThrowsMessage<CheckpointError>(::testing::HasSubstr("master_param.1")));
}

}  // namespace master_weights_test
}  // namespace lockstep
