// The tutorial's model: two convolutions, dropout, two linear layers.
#pragma once

#include <ATen/ops/conv2d.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/feature_dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <vector>

namespace rpc_tutorial {

/// The model as a function of its parameters, in the order of Net's. Takes [batch, 1, 28, 28],
/// gives logarithms of probabilities, [batch, 10].
inline at::Tensor net_forward(const std::vector<at::Tensor>& parameters, const at::Tensor& images,
                              bool training) {
  const auto& p = parameters;
  auto x = at::conv2d(images, p[0], p[1]).relu();
  x = at::max_pool2d(at::conv2d(x, p[2], p[3]).relu(), 2);
  x = at::feature_dropout(x, 0.25, training).flatten(1);
  x = at::dropout(at::linear(x, p[4], p[5]).relu(), 0.5, training);
  return at::log_softmax(at::linear(x, p[6], p[7]), 1);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    namespace nn = torch::nn;
    register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 32, 3)));
    register_module("conv2", nn::Conv2d(nn::Conv2dOptions(32, 64, 3)));
    register_module("fc1", nn::Linear(9216, 128));
    register_module("fc2", nn::Linear(128, 10));
  }

  at::Tensor forward(const at::Tensor& images, bool training) {
    return net_forward(parameters(), images, training);
  }
};
TORCH_MODULE(Net);

}  // namespace rpc_tutorial
