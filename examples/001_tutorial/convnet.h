// The tutorial's model: two blocks of convolution, batch norm, ReLU and pooling, then a linear
// layer. The tensors have the names of the Python class's state_dict (layer1.0.weight, ...).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/pimpl.h>

namespace tutorial {

/// Takes [batch, 1, 28, 28], gives [batch, num_classes].
struct ConvNetImpl : torch::nn::Module {
  explicit ConvNetImpl(int64_t num_classes = 10) {
    namespace nn = torch::nn;
    layer1 = register_module(
        "layer1", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 5).stride(1).padding(2)),
                                 nn::BatchNorm2d(16), nn::ReLU(),
                                 nn::MaxPool2d(nn::MaxPool2dOptions(2).stride(2))));
    layer2 = register_module(
        "layer2", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(16, 32, 5).stride(1).padding(2)),
                                 nn::BatchNorm2d(32), nn::ReLU(),
                                 nn::MaxPool2d(nn::MaxPool2dOptions(2).stride(2))));
    fc = register_module("fc", nn::Linear(7 * 7 * 32, num_classes));
  }

  at::Tensor forward(const at::Tensor& x) {
    auto out = layer1->forward(x);
    out = layer2->forward(out);
    out = out.reshape({out.size(0), -1});
    return fc->forward(out);
  }

  torch::nn::Sequential layer1{nullptr};
  torch::nn::Sequential layer2{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ConvNet);

}  // namespace tutorial
