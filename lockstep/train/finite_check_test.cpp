#include "lockstep/train/finite_check.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/train/step_loop.h"
#include "tests/support/run_group.h"
#include "tests/support/small_task.h"

namespace lockstep {
namespace finite_check_test {

using test::loader_of;
using test::noise_images;
using test::run_group;
using test::small_task;
using test::train_task;
using test::TrainTask;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(FiniteCheck, EveryGradientCounts) {
  run_group(1, [](ProcessGroup group) {
    for (const double bad : {kNan, std::numeric_limits<double>::infinity()}) {
      for (size_t at = 0; at < 3; ++at) {
        std::vector<at::Tensor> parameters;
        for (int i = 0; i < 3; ++i) {
          parameters.push_back(at::ones({40}).requires_grad_());
          parameters.back().mutable_grad() = at::ones({40});
        }
        FiniteCheck check(OnNan::stop, group);
        EXPECT_TRUE(check.step_is_good({gradients_of(parameters)}, 1, 0));
        parameters[at].mutable_grad()[at] = bad;
        EXPECT_THAT(
            [&] { check.step_is_good({gradients_of(parameters)}, 2, 0); },
            ThrowsMessage<NumericError>(HasSubstr("a gradient is NaN or infinite at step 2")));
      }
    }
  });
}

/// A resumed run may have only the skipped steps of its epoch left. The first run went on, too.
TEST(FiniteCheck, AllStepsOfAnEpochAreOfAWholeOne) {
  run_group(1, [](ProcessGroup group) {
    std::vector<at::Tensor> parameters{at::ones({4}).requires_grad_()};
    parameters[0].mutable_grad() = at::full({4}, kNan);
    FiniteCheck check(OnNan::skip, group);
    const auto gradients = gradients_of(parameters);
    EXPECT_FALSE(check.step_is_good({gradients}, 7, 0));
    check.end_epoch(0, 1, /*from_its_start=*/false);
    EXPECT_FALSE(check.step_is_good({gradients}, 8, 1));
    EXPECT_THAT([&] { check.end_epoch(1, 1, /*from_its_start=*/true); },
                ThrowsMessage<NumericError>(HasSubstr("every step of epoch 2 was skipped (1)")));
  });
}

/// Its loss of zeros is NaN, that of a real batch is finite.
class Normed : public TrainingModule<Batch> {
 public:
  explicit Normed(bool automatic) : automatic_(automatic) {}
  bool automatic_optimization() const override { return automatic_; }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    const auto loss = [&] {
      return (batch.data / batch.data.norm(2, 1, true)).matmul(weight).square().mean();
    };
    if (automatic_) return loss();
    update("", loss);
    return {};
  }
  std::vector<OptimizerConfig> configure_optimizers() override {
    return {{.make = optimizer_factory("sgd", {.lr = 0.1})}};
  }
  at::Tensor weight = register_parameter("weight", at::ones({784}));

 private:
  bool automatic_;
};

/// A resumed run begins with a batch of zeros, of which the first real step must know nothing.
TEST(FiniteCheck, AWarmUpLeavesNoTrace) {
  const TensorDataset dataset = noise_images(32);
  for (const OnNan policy : {OnNan::stop, OnNan::skip}) {
    for (const bool automatic : {true, false}) {
      std::vector<at::Tensor> weights;
      for (const bool warm : {false, true}) {
        std::vector<std::shared_ptr<Normed>> modules;
        std::vector<TrainTask> tasks;
        for (int rank = 0; rank < 2; ++rank) {
          modules.push_back(std::make_shared<Normed>(automatic));
          tasks.push_back(train_task(modules.back(), loader_of(dataset, rank, 2)));
        }
        run_group(2,
                  [&](ProcessGroup group) {
                    TrainerOptions options;
                    options.on_nan = policy;
                    StepLoop loop(tasks[static_cast<size_t>(group.rank())], group, options);
                    if (warm) loop.warm_up();
                    loop.run_epoch(0, 0, [](const StepResult&) { return true; });
                  },
                  {.backend = "shm"});
        weights.push_back(modules[0]->weight.detach());
      }
      EXPECT_FALSE(at::equal(weights[0], at::ones({784})));
      EXPECT_TRUE(at::equal(weights[0], weights[1]));
    }
  }
}

/// What a rank saw after each step.
struct Seen {
  std::vector<double> losses;
  std::vector<std::vector<at::Tensor>> buffers;  ///< First those before the first step.
};

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) all.push_back(tensor.clone());
  return all;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

class SkippedSteps : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, SkippedSteps, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return info.param; });

/// Batch norm has seen the NaN of one rank; the other's batch was good, and is dropped as well.
TEST_P(SkippedSteps, LeaveBuffersAsTheyWereOnAllRanks) {
  for (const int64_t accumulated : {1, 2}) {
    TensorDataset dataset = noise_images(96);
    dataset.data[17][0] = kNan;
    // Made before the ranks' threads begin: they share LibTorch's random state.
    std::vector<TrainTask> tasks;
    for (int rank = 0; rank < 2; ++rank) tasks.push_back(small_task("convnet", dataset, rank, 2));
    std::vector<Seen> seen(2);
    run_group(2,
              [&](ProcessGroup group) {
                const auto rank = static_cast<size_t>(group.rank());
                TrainerOptions options;
                options.on_nan = OnNan::skip;
                options.accumulate_grad_batches = accumulated;
                StepLoop loop(tasks[rank], group, options);
                const auto buffers = [&] { return copies(tasks[rank].module->buffers()); };
                seen[rank].buffers.push_back(buffers());
                loop.run_epoch(0, 0, [&](const StepResult&) {
                  seen[rank].buffers.push_back(buffers());
                  seen[rank].losses.push_back(loop.take_sums().front().loss.weight);
                  return true;
                });
              },
              {.backend = GetParam()});
    ASSERT_FALSE(seen[0].buffers[0].empty());
    int skipped = 0;
    for (size_t step = 0; step < seen[0].losses.size(); ++step) {
      const double whole = static_cast<double>(8 * accumulated);
      const bool bad = seen[0].losses[step] != whole || seen[1].losses[step] != whole;
      skipped += bad;
      for (const Seen& rank : seen) {
        EXPECT_EQ(equal(rank.buffers[step], rank.buffers[step + 1]), bad) << "step " << step;
        for (const at::Tensor& buffer : rank.buffers[step + 1])
          EXPECT_TRUE(std::isfinite(buffer.sum().item<double>())) << "step " << step;
      }
    }
    EXPECT_EQ(skipped, 1);
  }
}

}  // namespace finite_check_test
}  // namespace lockstep
