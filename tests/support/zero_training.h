#pragma once

// For tests: a module to train with a strategy, and what becomes of it.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/optim/optim.h"
#include "lockstep/parallel/strategy.h"
#include "tests/support/ddp_test_modules.h"

namespace lockstep::zero_test {

using MakeStrategy = std::unique_ptr<Strategy> (*)(const StrategySetup& setup);

/// Layers of odd sizes and strides, and a frozen one.
struct Net : torch::nn::Module {
  Net() {
    register_module("conv", conv);
    register_module("frozen", frozen);
    register_module("first", first);
    register_module("last", last);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    ddp_test::fill(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::relu(conv(x.view({-1, 3, 5, 5}))).flatten(1);
    return last(at::tanh(first(frozen(h))));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 7, 3)};
  torch::nn::Linear frozen{63, 37}, first{37, 29}, last{29, 3};
};

/// Not elementwise: each parameter moves by its gradient over that one's norm.
class Normed : public Optimizer {
 public:
  explicit Normed(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {}
  void step() override {
    const c10::AutoGradMode no_grad(false);
    for (at::Tensor& p : parameters_) {
      if (p.grad().defined()) p.sub_(p.grad() / (p.grad().norm() + 1), lr_);
    }
  }
  void step_scaled(const StepScale&) override { step(); }
  void set_lr(double lr) override { lr_ = lr; }
  double lr() const override { return lr_; }
  const std::vector<at::Tensor>& parameters() const override { return parameters_; }
  StateDict state() const override { return {}; }
  void load_state(const StateDict&) override {}
  const std::string& name() const override { return name_; }

 private:
  std::string name_ = "normed";
  std::vector<at::Tensor> parameters_;
  double lr_ = 0.1;
};

/// The same names in the same order, and of some parameters the same values.
inline void expect_same_entries(const StateDict& expected, const StateDict& got,
                                const std::vector<size_t>& parameters) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(expected[i].first, got[i].first);
    for (const size_t parameter : parameters) {
      if (!expected[i].first.ends_with("." + std::to_string(parameter))) continue;
      EXPECT_TRUE(at::equal(expected[i].second.flatten(), got[i].second.flatten()))
          << expected[i].first;
    }
  }
}

struct Job {
  std::string optimizer = "adam";
  OptimizerOptions options = {.lr = 0.05};
  int steps = 3;
  int accumulate = 1;
  double max_norm = 0;  ///< 0: no clipping.
};

inline OptimizerFactory factory_of(const Job& job) {
  return [job](std::vector<at::Tensor> parts) -> std::unique_ptr<Optimizer> {
    if (job.optimizer == "normed") return std::make_unique<Normed>(std::move(parts));
    return make_optimizer(job.optimizer, std::move(parts), job.options);
  };
}

struct Trained {
  std::vector<double> losses;
  std::vector<double> norms;
  StateDict model;      ///< Of this rank's module.
  StateDict optimizer;  ///< On rank 0.
};

inline StateDict copied(const StateDict& state) {
  StateDict copy;
  for (const auto& [name, tensor] : state) copy.emplace_back(name, tensor.detach().clone());
  return copy;
}

inline void train_steps(Strategy& strategy, Net& net, const Job& job, int first, int steps,
                        Trained& trained) {
  const int rank = strategy.group().rank();
  for (int step = first; step < first + steps; ++step) {
    for (int batch = 0; batch < job.accumulate; ++batch) {
      const at::Tensor x = ddp_test::values({4, 75}, 100 * rank + 10 * step + batch);
      BatchWork work;
      work.loss = [&] {
        const at::Tensor loss = net.forward(x).square().mean() / job.accumulate;
        trained.losses.push_back(loss.item<double>());
        return loss;
      };
      work.last_of_step = batch + 1 == job.accumulate;
      strategy.run_batch(work);
    }
    if (job.max_norm > 0) trained.norms.push_back(strategy.clip_grad_norm(job.max_norm));
    strategy.step();
    strategy.zero_grad();
  }
}

inline StrategySetup setup_of(const std::shared_ptr<Net>& net, const ProcessGroup& group,
                              const Job& job) {
  StrategySetup setup;
  setup.module = net;
  setup.make_optimizer = factory_of(job);
  setup.group = group;
  return setup;
}

inline StateDict tensors_of(const torch::nn::Module& module) {
  StateDict state;
  for (const auto& item : module.named_parameters())
    state.emplace_back(item.key(), item.value().detach().clone());
  return state;
}

inline Trained train(MakeStrategy make, const ProcessGroup& group, const Job& job) {
  auto net = std::make_shared<Net>();
  const auto strategy = make(setup_of(net, group, job));
  Trained trained;
  train_steps(*strategy, *net, job, 0, job.steps, trained);
  trained.model = tensors_of(*net);
  trained.optimizer = copied(strategy->optimizer_state());
  return trained;
}

inline void expect_same(const StateDict& a, const StateDict& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first) << what;
    EXPECT_TRUE(at::equal(a[i].second, b[i].second)) << what << ", " << a[i].first;
  }
}

}  // namespace lockstep::zero_test
