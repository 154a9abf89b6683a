#include "lockstep/amp/precision.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <limits>

#include "lockstep/amp/half_support.h"
#include "lockstep/base/error.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace precision_test {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class Net : public torch::nn::Module {
 public:
  Net()
      : linear_(register_module("linear", torch::nn::Linear(4, 4))),
        norm_(register_module("norm", torch::nn::BatchNorm1d(4))) {}
  at::Tensor forward(const at::Tensor& x) { return norm_->forward(linear_->forward(x)); }

 private:
  torch::nn::Linear linear_;
  torch::nn::BatchNorm1d norm_;
};

at::ScalarType dtype_of(const Net& net, const std::string& name) {
  const auto parameters = net.named_parameters();
  return parameters.contains(name) ? parameters[name].scalar_type()
                                   : net.named_buffers()[name].scalar_type();
}

/// What a name comes to, seen from outside.
struct Expected {
  const char* precision;
  const char* level;
  at::ScalarType weights, norm, computes;
  bool copies, dynamic;
};

TEST(Precision, EachNameMeansWhatTheTableSays) {
  const auto f32 = at::kFloat, f16 = at::kHalf, bf16 = at::kBFloat16;
  const std::vector<Expected> table{
      {"32-true", "", f32, f32, f32, false, false},
      {"32-true", "O0", f32, f32, f32, false, false},
      {"bf16-mixed", "", f32, f32, bf16, false, false},
      {"16-mixed", "", f32, f32, f16, false, true},
      {"32-true", "O1", f32, f32, f16, false, true},
      {"bf16-mixed", "O1", f32, f32, bf16, false, false},
      {"32-true", "O2", f16, f32, f16, true, true},
      {"bf16-mixed", "O2", bf16, f32, bf16, true, false},
      {"bf16-true", "", bf16, bf16, bf16, false, false},
      {"16-true", "", f16, f16, f16, false, false},
      {"32-true", "O3", f16, f16, f16, false, false},
      {"bf16-true", "O3", bf16, bf16, bf16, false, false},
  };
  for (const Expected& expected : table) {
    const Precision precision({.precision = expected.precision, .amp_level = expected.level});
    SCOPED_TRACE(precision.name());
    Net net;
    precision.convert(net);
    EXPECT_EQ(dtype_of(net, "linear.weight"), expected.weights);
    EXPECT_EQ(dtype_of(net, "norm.weight"), expected.norm);
    EXPECT_EQ(dtype_of(net, "norm.running_var"), expected.norm);
    EXPECT_EQ(dtype_of(net, "norm.num_batches_tracked"), at::kLong);
    EXPECT_EQ(precision.expects_overflow(), expected.dynamic);
    EXPECT_EQ(precision.loss_scale(), expected.dynamic ? 65536 : 1);
    const auto context = precision.forward_context();
    const auto guard = context ? context() : nullptr;
    const at::Tensor x = precision.convert_input(at::ones({2, 4}));
    EXPECT_EQ(at::linear(x, net.named_parameters()["linear.weight"]).scalar_type(),
              expected.computes);
    EXPECT_EQ(precision.convert_output(net.forward(x)).scalar_type(), at::kFloat);
    EXPECT_EQ(precision.convert_input(at::ones({1}, at::kLong)).scalar_type(), at::kLong);
    const auto optimizer = precision.optimizer_factory([](std::vector<at::Tensor> parameters) {
      return make_optimizer("sgd", std::move(parameters), {});
    })(net.parameters());
    bool copies = false;
    for (const auto& [name, tensor] : optimizer->state())
      copies |= name.starts_with("master_param");
    EXPECT_EQ(copies, expected.copies);
  }
}

TEST(Precision, RefusesNames) {
  const auto refuses = [](const PrecisionOptions& options, const char* what) {
    EXPECT_THAT([&] { Precision precision(options); }, ThrowsMessage<UsageError>(HasSubstr(what)));
  };
  refuses({.precision = "bf16-mixd"}, "did you mean 'bf16-mixed'?");
  refuses({.amp_level = "O4"}, "unknown amp level 'O4'");
  refuses({.amp_level = "02"}, "a capital letter O, not a zero");
  refuses({.precision = "16-mixed", .amp_level = "O0"}, "take precision 32-true");
  refuses({.precision = "16-true", .amp_level = "O1"}, "take precision 16-mixed or bf16-mixed");
  refuses({.precision = "bf16-mixed", .amp_level = "O3"}, "take precision 16-true or bf16-true");
  for (const char* scale : {"0", "-2", "nan", "inf", "dynamik", "1e"}) {
    refuses({.precision = "16-mixed", .loss_scale = scale},
            "neither 'dynamic' nor a number above 0");
  }
}

TEST(Precision, AStaticScaleStays) {
  Precision precision({.precision = "16-mixed", .loss_scale = "128"});
  const at::Tensor weight = at::ones({2}).requires_grad_();
  for (int i = 0; i < 3; ++i) {
    weight.mutable_grad().reset();
    precision.scale(weight.sum()).backward();
    EXPECT_EQ(weight.grad()[0].item<double>(), 128);
    const StepScale scale = precision.unscale({weight.grad()});
    EXPECT_FALSE(scale.grad_scale.defined() || scale.found_inf.defined());
    EXPECT_EQ(weight.grad()[0].item<double>(), 1);
    EXPECT_FALSE(precision.skipped());
    precision.update();
  }
  EXPECT_TRUE(precision.state().empty());
}

TEST(Precision, WithoutAScaleNothingIsTouched) {
  Precision precision({.precision = "bf16-mixed"});
  const at::Tensor loss = at::ones({});
  EXPECT_EQ(precision.scale(loss).unsafeGetTensorImpl(), loss.unsafeGetTensorImpl());
  const StepScale scale = precision.unscale({at::full({2}, std::nan(""))});
  EXPECT_FALSE(scale.grad_scale.defined() || scale.found_inf.defined());
  EXPECT_EQ(precision.clip_grad_norm(2, [](double max) { return max; }), 2);
  precision.update();
}

/// A step of `precision` from a gradient of the unscaled loss.
StepScale step_with(Precision& precision, double gradient, const ProcessGroup& group = {}) {
  const at::Tensor weight = at::ones({2}).requires_grad_();
  precision.scale((weight * gradient).sum()).backward();
  return precision.unscale({weight.grad()}, group);
}

TEST(Precision, ADynamicScaleFollowsTheGradients) {
  Precision precision({.precision = "16-mixed"});
  EXPECT_EQ(step_with(precision, 1).found_inf.item<double>(), 0);
  EXPECT_FALSE(precision.skipped());
  precision.update();
  EXPECT_EQ(step_with(precision, std::numeric_limits<double>::infinity()).found_inf.item<double>(),
            1);
  EXPECT_TRUE(precision.skipped());
  precision.update();
  EXPECT_EQ(precision.loss_scale(), 32768);

  Precision resumed({.precision = "16-mixed"});
  resumed.load_state(precision.state());
  EXPECT_EQ(resumed.loss_scale(), 32768);
  resumed.load_state({});
  EXPECT_EQ(resumed.loss_scale(), 32768);
}

TEST(Precision, GrowsAfter2000Steps) {
  Precision precision({.precision = "16-mixed"});
  for (int i = 0; i < 2000; ++i) {
    EXPECT_EQ(precision.loss_scale(), 65536);
    (void)precision.unscale({});
    precision.update();
  }
  EXPECT_EQ(precision.loss_scale(), 131072);
}

TEST(Precision, GradientsThatAreNeverFiniteEndTheRun) {
  Precision precision({.precision = "16-mixed"});
  int steps = 0;
  EXPECT_THAT(
      [&] {
        for (; steps < 100; ++steps) {
          step_with(precision, std::nan(""));
          precision.update();
        }
      },
      ThrowsMessage<NumericError>(HasSubstr("at every loss scale")));
  EXPECT_EQ(steps, 40);
}

TEST(Precision, RefusesCallsInTheWrongOrder) {
  Precision precision({.precision = "16-mixed"});
  EXPECT_THAT([&] { precision.clip_grad_norm(1, [](double max) { return max; }); },
              ThrowsMessage<UsageError>(
                  HasSubstr("call unscale() after the step's last batch, then clip")));
  EXPECT_THROW(precision.update(), UsageError);
  (void)precision.unscale({});
  EXPECT_THROW((void)precision.unscale({}), UsageError);
}

TEST(Precision, ClipsGradientsThatKeepTheirScale) {
  Precision precision({.amp_level = "O2"});
  const at::Tensor weight = at::ones({4}, at::kHalf).requires_grad_();
  const auto optimizer = precision.optimizer_factory([](std::vector<at::Tensor> parameters) {
    return make_optimizer("sgd", std::move(parameters), {.lr = 1});
  })({weight});
  // With their scale of 65536 they are near the end of float16, and their norm is beyond it.
  precision.scale((weight.to(at::kFloat) * 0.75).sum()).backward();
  const StepScale scale = precision.unscale({weight.grad()});
  const double norm = precision.clip_grad_norm(
      1, [&](double max) { return clip_grad_norm(optimizer->parameters(), max); });
  EXPECT_EQ(norm, 1.5);
  optimizer->step_scaled(scale);
  EXPECT_NEAR(weight[0].item<double>(), 0.5, 1e-3);
}

TEST(Precision, StepsAnOptimizerOfOnesOwn) {
  for (const char* level : {"O0", "O1", "O2", "O3"}) {
    Precision precision({.amp_level = level});
    const at::Tensor weight = precision.convert_input(at::ones({4})).requires_grad_();
    const auto optimizer = precision.optimizer_factory([](std::vector<at::Tensor> parameters) {
      return make_optimizer("sgd", std::move(parameters), {.lr = 1});
    })({weight});
    const auto step_from = [&](double gradient) {
      zero_grad({weight});
      precision.scale((weight.to(at::kFloat) * gradient).sum()).backward();
      return precision.step(*optimizer);
    };
    EXPECT_TRUE(step_from(0.25)) << level;
    EXPECT_EQ(weight[0].item<double>(), 0.75) << level;
    if (!precision.expects_overflow()) continue;
    EXPECT_FALSE(step_from(std::nan(""))) << level;
    EXPECT_EQ(weight[0].item<double>(), 0.75) << level;
    EXPECT_EQ(precision.loss_scale(), 32768) << level;
  }
}

class PrecisionOverRanks : public test::OverBackends {};

TEST_P(PrecisionOverRanks, AllSkipWhereOneShardOverflows) {
  for (const int size : {2, 4}) {
    run_group(size, [](const ProcessGroup& group) {
      Precision precision({.precision = "16-mixed"});
      const bool bad = group.rank() == group.size() - 1;
      step_with(precision, bad ? std::nan("") : 1, group);
      EXPECT_TRUE(precision.skipped());
      precision.update();
      EXPECT_EQ(precision.loss_scale(), 32768);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(, PrecisionOverRanks, test::over_backends(), test::backend_name);

TEST(HalfSupport, NamesAReason) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const HalfSupport support = half_support(c10::kCPU, dtype);
    EXPECT_FALSE(support.reason.empty());
    const Precision precision({.precision = dtype == at::kHalf ? "16-mixed" : "bf16-mixed"});
    EXPECT_EQ(precision.slow_because().empty(), support.fast);
    EXPECT_GE(support.instructions, support.fast);
    // A processor's instructions are judged by their speed, and both times are told.
    const bool measured = support.instructions && !support.fast;
    EXPECT_EQ(support.reason.find("us in float32") != std::string::npos, measured);
  }
  EXPECT_TRUE(Precision().slow_because().empty());
  EXPECT_THROW(half_support(c10::kCPU, at::kFloat), UsageError);
}

}  // namespace precision_test
}  // namespace lockstep
