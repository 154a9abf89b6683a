#pragma once

// For tests: what averaged gradients are to be, by one process.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <vector>

namespace lockstep::ddp_test {

using Tensors = std::vector<at::Tensor>;

/// The mean over the ranks of the gradients that `run` leaves, on one process.
template <class Module, class Run>
Tensors mean_gradients(int ranks, const torch::nn::Module& like, Run run) {
  Tensors mean;
  for (int rank = 0; rank < ranks; ++rank) {
    Module net;
    const auto parameters = net.parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].data().copy_(like.parameters()[i].detach());
    run(net, rank);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor part = parameters[i].grad() / ranks;
      rank == 0 ? mean.push_back(part) : static_cast<void>(mean[i] += part);
    }
  }
  return mean;
}

inline void expect_gradients(const torch::nn::Module& module, const Tensors& expected) {
  const auto parameters = module.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i].grad().defined()) << i;
    EXPECT_TRUE(at::allclose(parameters[i].grad(), expected[i], 1e-4, 1e-6)) << i;
  }
}

}  // namespace lockstep::ddp_test
