#include "lockstep/parallel/pipeline/pipeline_strategy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "tests/support/pipeline_test_models.h"

namespace lockstep {
namespace local_pipeline_test {

using pipeline_test::accumulate;
using pipeline_test::batch_of;
using pipeline_test::Chain;
using pipeline_test::mean_square;
using ::testing::HasSubstr;

BatchWork work_of(const pipeline_test::Batch& batch) {
  BatchWork work;
  work.input = batch.input;
  work.target = batch.target;
  work.criterion = mean_square;
  return work;
}

TEST(LocalPipeline, IsOneThreadToTheLastBit) {
  Chain alone;
  const auto batch = batch_of(8, 1);
  for (int step = 0; step < 2; ++step) accumulate(alone.layers(), batch, 4);
  for (const std::string& schedule : pipeline_schedule_names()) {
    for (const size_t devices : {1, 2, 3}) {
      for (const bool recompute : {false, true}) {
        Chain model;
        LocalPipeline pipeline(model.layers(), std::vector<c10::Device>(devices, c10::kCPU),
                               {.schedule = schedule, .recompute_activations = recompute});
        for (int step = 0; step < 2; ++step) pipeline.run_batch(work_of(batch));
        for (size_t i = 0; i < alone.parameters().size(); ++i) {
          EXPECT_TRUE(at::equal(model.parameters()[i].grad(), alone.parameters()[i].grad()))
              << schedule << " on " << devices << ", parameter " << i;
        }
        EXPECT_TRUE(at::equal(model.norm->running_mean, alone.norm->running_mean));
        EXPECT_EQ(pipeline.parameters().size(), model.parameters().size());
        alone.eval();
        model.eval();
        EXPECT_TRUE(at::equal(pipeline.predict(batch.input),
                              pipeline_test::through(alone.layers(), batch.input)));
        alone.train();
      }
    }
  }
}

/// One weight, and a dropout. So the loss is linear in the weight.
struct Scaled : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::full({1}, 1.5));
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (int i = 0; i < 3; ++i) y = at::dropout(y, 0.3, /*train=*/true);
    return y * weight;
  }
};

/// The weight times its gradient is the loss only where both forwards dropped the same values.
TEST(LocalPipeline, RecomputesWithTheSameRandomNumbers) {
  for (const std::string& schedule : pipeline_schedule_names()) {
    for (int trial = 0; trial < 10; ++trial) {
      std::vector<std::shared_ptr<Scaled>> modules;
      std::vector<Layer> layers;
      for (int i = 0; i < 4; ++i) {
        const auto module = modules.emplace_back(std::make_shared<Scaled>());
        layers.push_back({std::to_string(i), module,
                          [module](const at::Tensor& x) { return module->forward(x); }});
      }
      LocalPipeline pipeline(layers, {c10::kCPU, c10::kCPU},
                             {.schedule = schedule, .recompute_activations = true});
      double loss = 0;  // Of the last stage's thread.
      BatchWork work;
      work.input = at::ones({32, 256});
      work.target = at::zeros({32});
      work.criterion = [&](const at::Tensor& output, const at::Tensor&) {
        const at::Tensor of_part = output.mean();
        loss += of_part.item<double>() / 4;
        return of_part;
      };
      pipeline.run_batch(work);
      for (const auto& module : modules) {
        EXPECT_NEAR(module->weight.grad().item<double>() * 1.5, loss, 1e-4 * loss) << schedule;
      }
    }
  }
}

TEST(LocalPipeline, RethrowsAStagesExceptionAndGoesOn) {
  Chain model(4);
  auto layers = model.layers();
  bool fails = true;
  const std::thread::id here = std::this_thread::get_id();
  layers[3].forward = [&, inner = layers[3].forward](const at::Tensor& x) {
    EXPECT_NE(std::this_thread::get_id(), here);
    if (fails) throw std::runtime_error("layer 3 is broken");
    return inner(x);
  };
  LocalPipeline pipeline(layers, {c10::kCPU, c10::kCPU, c10::kCPU});
  const auto text = [&] {
    try {
      pipeline.run_batch(work_of(batch_of(8, 1)));
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(text(), "layer 3 is broken");
  EXPECT_EQ(text(), "layer 3 is broken");
  fails = false;
  EXPECT_EQ(text(), "no error");
}

TEST(LocalPipeline, TakesAPlanAndNamesMistakes) {
  Chain model(4);
  const std::vector<c10::Device> two(2, c10::kCPU);
  EXPECT_NO_THROW(LocalPipeline(model.layers(), two, {.plan = {"linear3"}}));
  EXPECT_THROW(LocalPipeline(model.layers(), {}), UsageError);
  EXPECT_THROW(LocalPipeline(model.layers(), std::vector<c10::Device>(6, c10::kCPU)), UsageError);
  EXPECT_THROW(LocalPipeline(model.layers(), two, {.plan = {"linear8"}}), UsageError);
  LocalPipeline pipeline(model.layers(), two);
  EXPECT_THROW(pipeline.run_batch({.loss = [] { return at::Tensor(); }}), UsageError);
}

}  // namespace local_pipeline_test
}  // namespace lockstep
