// The multilayer perceptron that all programs of this folder train on MNIST.
#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

namespace playground {

/// Takes [batch, 784], gives [batch, 10].
inline torch::nn::Sequential make_mlp() {
  return torch::nn::Sequential{torch::nn::Linear(28 * 28, 128), torch::nn::ReLU(),
                               torch::nn::Linear(128, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 10)};
}

}  // namespace playground
