#include "lockstep/optim/torch_optimizer.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "lockstep/base/error.h"
#include "tests/support/plain_optimizers.h"

namespace lockstep {
namespace adam_test {

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

std::vector<at::Tensor> leaves(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& value : values) all.push_back(value.detach().clone().requires_grad_());
  return all;
}

void set_gradients(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                   double factor = 1) {
  for (size_t i = 0; i < a.size(); ++i) {
    a[i].mutable_grad() = at::randn(a[i].sizes(), a[i].options().requires_grad(false));
    b[i].mutable_grad() = a[i].grad().mul(factor);
  }
}

StateDict copied(StateDict state) {
  for (auto& [name, tensor] : state) tensor = tensor.clone();
  return state;
}

bool same_state(const StateDict& a, const StateDict& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].first != b[i].first || !same_bits(a[i].second, b[i].second)) return false;
  }
  return true;
}

/// The largest difference in units in the last place of the larger of parameter and update.
double distance(const at::Tensor& a, const at::Tensor& b, const at::Tensor& before) {
  const double unit = a.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                     : std::numeric_limits<float>::epsilon();
  const at::Tensor x = a.detach().to(at::kDouble), y = b.detach().to(at::kDouble);
  const at::Tensor old = before.detach().to(at::kDouble);
  const at::Tensor size = at::maximum(y.abs(), (y - old).abs());
  // The last place of a number is its power of two times `unit`.
  const at::Tensor place = at::exp2(at::floor(at::log2(size.clamp_min(1e-300)))) * unit;
  return ((x - y).abs() / place).max().item<double>();
}

std::vector<OptimizerOptions> variants() {
  std::vector<OptimizerOptions> all(5);
  all[1].weight_decay = 0.1;
  all[2].amsgrad = true;
  all[3].beta1 = 0.3;
  all[3].beta2 = 0.9;
  all[3].eps = 1e-5;
  all[4].amsgrad = true;
  all[4].weight_decay = 0.01;
  return all;
}

std::vector<at::Tensor> odd_sizes(at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (const int64_t size : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 255, 1000, 20011}) {
    // From large to small against the update, whose size is that of the learning rate.
    for (const double scale : {1.0, 1e-3}) all.push_back((at::randn({size}) * scale).to(dtype));
  }
  return all;
}

/// A step as Python's torch.optim.Adam and AdamW write it by default, one operation after the
/// other. `state`: step, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
void plain_step(const std::string& name, at::Tensor parameter, at::Tensor gradient,
                const std::vector<at::Tensor>& state, const OptimizerOptions& o) {
  const c10::AutoGradMode no_grad(false);
  const double step = static_cast<double>(state[0].item<int64_t>() + 1);
  const double decay = o.weight_decay.value_or(name == "adamw" ? 0.01 : 0);
  if (name == "adamw") {
    parameter.mul_(1 - o.lr * decay);
  } else if (decay != 0) {
    gradient = gradient.add(parameter, decay);
  }
  state[1].lerp_(gradient, 1 - o.beta1);
  state[2].mul_(o.beta2).addcmul_(gradient, gradient, 1 - o.beta2);
  if (o.amsgrad) state[3].copy_(at::maximum(state[3], state[2]));
  const double correction1 = 1 - std::pow(o.beta1, step), correction2 = 1 - std::pow(o.beta2, step);
  const at::Tensor squares = o.amsgrad ? state[3] : state[2];
  const at::Tensor divisor = (squares.sqrt() / std::sqrt(correction2)).add_(o.eps.value_or(1e-8));
  parameter.addcdiv_(state[1], divisor, -o.lr / correction1);
}

void expect_near_plain_step(const std::string& name, const OptimizerOptions& options,
                            at::ScalarType dtype) {
  auto ours = leaves(odd_sizes(dtype));
  const auto fused = make_fused_adam(name, ours, options);
  for (int step = 0; step < 4; ++step) {
    const StateDict state = copied(fused->state());
    const size_t fields = state.size() / ours.size();
    std::vector<at::Tensor> before, plain;
    for (size_t i = 0; i < ours.size(); ++i) {
      before.push_back(ours[i].detach().clone());
      plain.push_back(ours[i].detach().clone());
      ours[i].mutable_grad() = at::randn(ours[i].sizes(), dtype);
      std::vector<at::Tensor> own;
      if (step == 0) {
        own = {at::zeros({1}, at::kLong), at::zeros_like(plain[i]), at::zeros_like(plain[i]),
               at::zeros_like(plain[i])};
      }
      for (size_t f = 0; f < fields; ++f) own.push_back(state[i * fields + f].second);
      plain_step(name, plain[i], ours[i].grad(), own, options);
    }
    fused->step();
    for (size_t i = 0; i < ours.size(); ++i) {
      ASSERT_LE(distance(ours[i], plain[i], before[i]), 8)
          << name << ", step " << step << ", " << ours[i].numel() << " of " << ours[i].dtype();
    }
  }
}

TEST(FusedAdam, OneStepIsWithinEightUnitsOfThePlainOne) {
  at::manual_seed(1);
  for (const std::string name : {"adam", "adamw"}) {
    for (const OptimizerOptions& options : variants()) {
      for (const auto dtype : {at::kFloat, at::kDouble}) {
        expect_near_plain_step(name, options, dtype);
      }
    }
  }
}

TEST(FusedAdam, TakesEachRealDtypeAndRefusesWhatIsNotDense) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    at::Tensor parameter = at::ones({2, 3, 4, 5}, dtype).contiguous(at::MemoryFormat::ChannelsLast);
    const auto adam = make_optimizer("adam", {parameter}, {.lr = 0.5});
    parameter.mutable_grad() = at::ones_like(parameter);
    adam->step();
    EXPECT_TRUE(at::allclose(parameter, at::full_like(parameter, 0.5), 1e-2, 1e-2)) << dtype;
  }
  for (at::Tensor parameter : {at::ones({3, 4}).slice(1, 0, 2), at::ones({3}, at::kComplexFloat)}) {
    const auto adam = make_optimizer("adam", {parameter}, {});
    adam->step();  // Without a gradient it may be anything, as a layer that a pipeline has freed.
    parameter.mutable_grad() = at::ones_like(parameter);
    EXPECT_THROW(adam->step(), UsageError);
  }
}

TEST(FusedAdam, StateGoesOnWithTheSameBits) {
  at::manual_seed(4);
  const std::vector<at::Tensor> start{at::randn({77}), at::randn({3, 3}, at::kDouble),
                                      at::randn({40}).to(at::kBFloat16)};
  auto a = leaves(start), b = leaves(start);
  const auto first = make_fused_adam("adamw", a, variants()[4]);
  auto second = make_fused_adam("adamw", b, variants()[4]);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      auto fresh = make_fused_adam("adamw", b, variants()[4]);
      fresh->load_state(second->state());
      second = std::move(fresh);
    }
    set_gradients(a, b);
    first->step();
    second->step();
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << i;
}

TEST(FusedAdam, MemoryOrderChangesNoBit) {
  at::manual_seed(5);
  // No rest after the last full vector, where the kernel rounds otherwise.
  const at::Tensor start = at::randn({8, 4, 5, 4});
  for (const bool same_gradient_order : {true, false}) {
    auto plain = start.clone().requires_grad_();
    auto last = start.contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    ASSERT_FALSE(last.is_contiguous());
    const auto a = make_fused_adam("adamw", {plain}, {}), b = make_fused_adam("adamw", {last}, {});
    for (int step = 0; step < 3; ++step) {
      plain.mutable_grad() = at::randn(start.sizes());
      last.mutable_grad() = same_gradient_order
                                ? plain.grad().contiguous(at::MemoryFormat::ChannelsLast)
                                : plain.grad().clone();
      a->step();
      b->step();
      ASSERT_TRUE(same_bits(plain, last)) << "step " << step;
    }
    EXPECT_TRUE(same_state(a->state(), b->state()));
  }
}

TEST(FusedAdam, RefusesASparseGradientAndChangesNothing) {
  auto p = leaves({at::ones({3}), at::ones({4, 2})});
  const auto adam = make_fused_adam("adam", p, {});
  p[0].mutable_grad() = at::ones({3});
  p[1].mutable_grad() =
      at::sparse_coo_tensor(at::tensor({1, 3}, at::kLong).view({1, 2}), at::ones({2, 2}), {4, 2});
  try {
    adam->step();
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("parameter 1 is sparse"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(at::equal(p[0].detach(), at::ones({3})));
  EXPECT_TRUE(adam->state().empty());
}

TEST(FusedAdam, LeavesParametersWithoutGradientAlone) {
  auto p = leaves({at::ones({40}), at::ones({40})});
  const auto adam = make_fused_adam("adamw", p, {});
  for (int step = 0; step < 3; ++step) {
    p[1].mutable_grad() = at::ones({40});
    adam->step();
  }
  EXPECT_TRUE(at::equal(p[0].detach(), at::ones({40})));
  ASSERT_EQ(adam->state().size(), 3u);
  EXPECT_EQ(adam->state()[0].first, "step.1");
  EXPECT_EQ(adam->state()[0].second.item<int64_t>(), 3);
}

TEST(FusedAdam, AutogradNoticesAStepBetweenForwardAndBackward) {
  auto p = leaves({at::ones({5}), at::ones({2, 3, 4, 4})});
  p[1] = p[1].detach().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const auto adam = make_fused_adam("adam", p, {});
  for (const at::Tensor& parameter : p) {
    const at::Tensor loss = (parameter * parameter).sum();
    parameter.mutable_grad() = at::ones_like(parameter.detach());
    adam->step();
    EXPECT_THROW(loss.backward(), c10::Error);
  }
}

/// Every optimizer has the step of a gradient scaler, by its kernel or by hand.
TEST(StepScaled, IsTheStepOfTheUnscaledGradient) {
  at::manual_seed(6);
  for (const std::string& name : test::plain_optimizers()) {
    const std::vector<at::Tensor> start{at::randn({37}), at::randn({2, 16})};
    auto a = leaves(start), b = leaves(start);
    auto plain = make_optimizer(name, a, {}), scaled = make_optimizer(name, b, {});
    for (int step = 0; step < 3; ++step) {
      set_gradients(a, b, 1024);  // A power of two: the division is exact.
      plain->step();
      scaled->step_scaled({at::full({1}, 1024, at::kFloat), at::zeros({1})});
    }
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << name;
  }
}

TEST(StepScaled, ChangesNothingWhenAGradientIsInfinite) {
  at::manual_seed(7);
  for (const std::string& name : test::plain_optimizers()) {
    auto p = leaves({at::randn({37})});
    auto optimizer = make_optimizer(name, p, {});
    set_gradients(p, p);
    optimizer->step();
    const StateDict state = copied(optimizer->state());
    const at::Tensor before = p[0].detach().clone();
    p[0].mutable_grad() = at::full({37}, INFINITY);
    // A scaler over several devices adds their flags.
    for (const double found : {1.0, 2.0}) {
      optimizer->step_scaled({at::full({1}, 8, at::kFloat), at::full({1}, found, at::kFloat)});
    }
    EXPECT_TRUE(same_bits(p[0], before)) << name;
    EXPECT_TRUE(same_state(optimizer->state(), state)) << name;
    p[0].mutable_grad() = at::ones({37});
    optimizer->step_scaled({});
    EXPECT_FALSE(same_bits(p[0], before)) << name;
  }
}

}  // namespace adam_test
}  // namespace lockstep
