#pragma once

// For tests: models as chains of layers, and the same training in one process.

#include <ATen/Functions.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <string>
#include <vector>

#include "lockstep/autograd/backward.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/state_dict.h"
#include "lockstep/parallel/strategy.h"
#include "tests/support/ddp_test_modules.h"

namespace lockstep::pipeline_test {

using ddp_test::values;

/// Linear layers with tanh between, and batch norm in the second place.
struct Chain : torch::nn::Module {
  explicit Chain(int count = 6, double seed = 1) {
    for (int i = 0; i < count; ++i) {
      linears.push_back(register_module("linear" + std::to_string(i), torch::nn::Linear(5, 5)));
    }
    norm = register_module("norm", torch::nn::BatchNorm1d(5));
    ddp_test::fill(*this, seed);
  }

  std::vector<Layer> layers() {
    std::vector<Layer> all;
    for (size_t i = 0; i < linears.size(); ++i) {
      auto linear = linears[i];
      all.push_back({"linear" + std::to_string(i), linear.ptr(),
                     [linear](const at::Tensor& x) mutable { return at::tanh(linear(x)); }});
      if (i == 0) {
        auto batch_norm = norm;
        all.push_back({"norm", norm.ptr(),
                       [batch_norm](const at::Tensor& x) mutable { return batch_norm(x); }});
      }
    }
    return all;
  }

  std::vector<torch::nn::Linear> linears;
  torch::nn::BatchNorm1d norm{nullptr};
};

inline at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

inline at::Tensor through(const std::vector<Layer>& layers, at::Tensor x) {
  for (const Layer& layer : layers) x = layer.forward(x);
  return x;
}

struct Batch {
  at::Tensor input;
  at::Tensor target;
};
inline Batch batch_of(int64_t samples, double seed) {
  return {values({samples, 5}, seed), values({samples, 5}, seed + 0.5)};
}

inline OptimizerFactory adam() {
  return [](std::vector<at::Tensor> parameters) {
    return make_optimizer("adam", std::move(parameters), {.lr = 0.01});
  };
}

/// What one process does with the micro-batches of a batch. Gives their losses.
inline std::vector<double> accumulate(const std::vector<Layer>& layers, const Batch& batch,
                                      int64_t micro_batches) {
  std::vector<double> losses;
  const auto inputs = batch.input.chunk(micro_batches), targets = batch.target.chunk(micro_batches);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor loss = mean_square(through(layers, inputs[i]), targets[i]);
    losses.push_back(loss.item<double>());
    backward(loss / static_cast<double>(micro_batches));
  }
  return losses;
}

/// Of one step with the gradients that the model has.
inline StateDict adam_state_after(const torch::nn::Module& model) {
  Chain copy(4);
  const auto to = copy.parameters(), from = model.parameters();
  for (size_t i = 0; i < to.size(); ++i) to[i].mutable_grad() = from[i].grad();
  const auto optimizer = adam()(to);
  optimizer->step();
  return optimizer->state();
}

}  // namespace lockstep::pipeline_test
