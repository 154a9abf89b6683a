// The tutorial's model: two convolutions, dropout, two linear layers.
#pragma once

#include <ATen/ops/dropout.h>
#include <ATen/ops/feature_dropout.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace rpc_tutorial {

/// Takes [batch, 1, 28, 28], gives logarithms of probabilities, [batch, 10].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    namespace nn = torch::nn;
    conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 32, 3)));
    conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(32, 64, 3)));
    fc1 = register_module("fc1", nn::Linear(9216, 128));
    fc2 = register_module("fc2", nn::Linear(128, 10));
  }

  /// Dropout is an argument: while one trainer evaluates, others train.
  at::Tensor forward(const at::Tensor& images, bool training) {
    auto x = conv1->forward(images).relu();
    x = at::max_pool2d(conv2->forward(x).relu(), 2);
    x = at::feature_dropout(x, 0.25, training).flatten(1);
    x = at::dropout(fc1->forward(x).relu(), 0.5, training);
    return at::log_softmax(fc2->forward(x), 1);
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

}  // namespace rpc_tutorial
