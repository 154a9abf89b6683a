#include "lockstep/amp/grad_scaler.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "lockstep/amp/precision.h"
#include "lockstep/base/error.h"
#include "tests/support/over_backends.h"

namespace lockstep {
namespace grad_scaler_test {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One parameter with an optimizer that subtracts the gradient.
struct Task {
  at::Tensor weight = at::ones({4}).requires_grad_();
  std::unique_ptr<Optimizer> optimizer = make_optimizer("sgd", {weight}, {.lr = 1});

  void backward_from(GradScaler& scaler, double gradient) {
    weight.mutable_grad().reset();
    scaler.scale((weight * gradient).sum()).backward();
  }
  double value() const { return weight[0].item<double>(); }
};

TEST(GradScaler, StepsWithUnscaledGradients) {
  Task task;
  GradScaler scaler;
  task.backward_from(scaler, 0.25);
  EXPECT_EQ(task.weight.grad()[0].item<double>(), 0.25 * 65536);
  EXPECT_TRUE(scaler.step(*task.optimizer));
  scaler.update();
  EXPECT_EQ(task.value(), 0.75);
  EXPECT_EQ(scaler.get_scale(), 65536);
}

TEST(GradScaler, SkipsAnOverflowAndShrinks) {
  Task task;
  GradScaler scaler;
  task.backward_from(scaler, kInfinity);
  EXPECT_FALSE(scaler.step(*task.optimizer));
  scaler.update();
  EXPECT_EQ(task.value(), 1);
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, GrowsAfterTheInterval) {
  Task task;
  GradScaler scaler({.init_scale = 8, .growth_factor = 4, .growth_interval = 3});
  for (const double expected : {8, 8, 32, 32, 32, 128}) {
    task.backward_from(scaler, 1);
    scaler.step(*task.optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), expected);
  }
}

TEST(GradScaler, OneOfTwoOptimizersIsSkipped) {
  Task good, bad;
  GradScaler scaler;
  good.backward_from(scaler, 1);
  bad.backward_from(scaler, kInfinity);
  EXPECT_TRUE(scaler.step(*good.optimizer));
  EXPECT_FALSE(scaler.step(*bad.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, ClipsAfterUnscaling) {
  Task task;
  GradScaler scaler;
  task.backward_from(scaler, 3);
  scaler.unscale_(*task.optimizer);
  EXPECT_EQ(scaler.clip_grad_norm_(*task.optimizer, 1), 6);  // 4 elements of 3
  EXPECT_TRUE(scaler.step(*task.optimizer));
  scaler.update();
  EXPECT_NEAR(task.value(), 0.5, 1e-6);
}

TEST(GradScaler, ClippingBeforeUnscalingSaysWhatToDo) {
  Task task;
  GradScaler scaler;
  task.backward_from(scaler, 3);
  EXPECT_THAT([&] { scaler.clip_grad_norm_(*task.optimizer, 1); },
              ThrowsMessage<UsageError>(HasSubstr("call scaler.unscale_(optimizer), then clip")));
  EXPECT_EQ(task.weight.grad()[0].item<double>(), 3 * 65536) << "the gradients were changed";
}

TEST(GradScaler, RefusesCallsInTheWrongOrder) {
  Task task;
  GradScaler scaler;
  const auto refuses = [](const auto& call, const char* what) {
    EXPECT_THAT(call, ThrowsMessage<UsageError>(HasSubstr(what)));
  };
  const auto step = [&] { scaler.step(*task.optimizer); };
  const auto unscale = [&] { scaler.unscale_(*task.optimizer); };
  const auto update = [&] { scaler.update(); };
  refuses(step, "step() before any scale()");
  refuses(unscale, "unscale_() before any scale()");
  refuses(update, "update() before any scale()");
  task.backward_from(scaler, 1);
  refuses(update, "update() without a step()");
  unscale();
  refuses(unscale, "has already been called on this optimizer since the last update()");
  step();
  refuses(step, "step() has already been called");
  refuses(unscale, "unscale_() is being called after step()");
  update();
  task.backward_from(scaler, 1);
  unscale();
}

TEST(GradScaler, RefusesToUnscaleFloat16) {
  const at::Tensor weight = at::ones({4}, at::kHalf).requires_grad_();
  const auto optimizer = make_optimizer("sgd", {weight}, {.lr = 1});
  GradScaler scaler({.init_scale = 8});
  scaler.scale(weight.sum()).backward();
  EXPECT_THAT([&] { scaler.unscale_(*optimizer); },
              ThrowsMessage<UsageError>(HasSubstr("give the optimizer master weights")));
}

TEST(GradScaler, MasterWeightsUnscaleTinyGradientsInFloat32) {
  const at::Tensor weight = at::ones({4}, at::kHalf).requires_grad_();
  MasterWeights optimizer({weight}, [](std::vector<at::Tensor> parameters) {
    return make_optimizer("sgd", std::move(parameters), {.lr = 64});
  });
  GradScaler scaler({.init_scale = 65536});
  // 2^-30 is nothing in float16, but 2^-14 is something.
  scaler.scale((weight.to(at::kFloat) * std::ldexp(1., -30)).sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_DOUBLE_EQ(scaler.clip_grad_norm_(optimizer, 100), std::ldexp(1., -29));
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_EQ(optimizer.master_parameters()[0][0].item<float>(), 1.F - std::ldexp(1.F, -24));
}

TEST(GradScaler, NotEnabledItDoesNothing) {
  Task task;
  GradScaler scaler({.enabled = false});
  task.backward_from(scaler, 0.25);
  scaler.unscale_(*task.optimizer);
  EXPECT_EQ(scaler.clip_grad_norm_(*task.optimizer, 100), 0.5);
  EXPECT_TRUE(scaler.step(*task.optimizer));
  scaler.update();
  EXPECT_EQ(task.value(), 0.75);
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(scaler.state_dict().empty());
  scaler.load_state_dict({});
}

TEST(GradScaler, GoesOnFromItsState) {
  Task task;
  GradScaler scaler({.init_scale = 8, .growth_interval = 2});
  task.backward_from(scaler, 1);
  scaler.step(*task.optimizer);
  scaler.update();
  GradScaler next;
  next.load_state_dict(scaler.state_dict());
  EXPECT_EQ(next.get_growth_interval(), 2);
  task.backward_from(next, 1);
  next.step(*task.optimizer);
  next.update();
  EXPECT_EQ(next.get_scale(), 16) << "the count of steps since the last change was lost";
  // The same for one that has scaled before.
  next.load_state_dict(scaler.state_dict());
  EXPECT_EQ(next.get_scale(), 8);
  task.backward_from(next, 1);
  next.step(*task.optimizer);
  next.update();
  EXPECT_EQ(next.get_scale(), 16);
  EXPECT_THAT([&] { next.load_state_dict({}); },
              ThrowsMessage<CheckpointError>(HasSubstr("a scaler that was not enabled")));
}

TEST(GradScaler, LooksAtSparseGradients) {
  const at::Tensor table = at::ones({5, 2}).requires_grad_();
  const auto optimizer = make_optimizer("sgd", {table}, {.lr = 1});
  GradScaler scaler({.init_scale = 8});
  const auto backward_from = [&](double gradient) {
    table.mutable_grad().reset();
    const at::Tensor rows = at::embedding(table, at::tensor({1, 1}), -1, false, /*sparse=*/true);
    scaler.scale((rows * gradient).sum()).backward();
  };
  backward_from(kInfinity);
  EXPECT_FALSE(scaler.step(*optimizer));
  scaler.update();
  backward_from(0.25);
  EXPECT_TRUE(scaler.step(*optimizer));
  EXPECT_EQ(table[1][0].item<double>(), 0.5);
  EXPECT_EQ(table[0][0].item<double>(), 1);
}

class GradScalerOverRanks : public test::OverBackends {};

TEST_P(GradScalerOverRanks, AllSkipWhereOneRankOverflows) {
  for (const int size : {1, 2, 4}) {
    run_group(size, [](const ProcessGroup& group) {
      Task task;
      GradScaler scaler({}, group);
      const int bad_rank = group.size() - 1;
      task.backward_from(scaler, group.rank() == bad_rank ? kInfinity : 1);
      EXPECT_FALSE(scaler.step(*task.optimizer));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32768);
      EXPECT_EQ(task.value(), 1);
      task.backward_from(scaler, 0.25);
      EXPECT_TRUE(scaler.step(*task.optimizer));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(, GradScalerOverRanks, test::over_backends(), test::backend_name);

}  // namespace grad_scaler_test
}  // namespace lockstep
