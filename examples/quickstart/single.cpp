// A program of your own in one process: an MLP on the built-in digits. distributed.cpp, beside this
// file, is the same on several processes, with four lines changed. Braces make the layers from left
// to right, as Python does: then their random weights are those of Python.
//   build/examples/quickstart/single
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  at::manual_seed(0);
  torch::nn::Sequential model{torch::nn::Linear(784, 128), torch::nn::ReLU(),
                              torch::nn::Linear(128, 10)};
  lockstep::set_num_threads_for(*model, 64);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));

  auto digits = lockstep::load_dataset("digits");
  lockstep::Compose transforms = {lockstep::normalize(), lockstep::flatten()};
  lockstep::DistributedSampler sampler({.dataset_size = digits.train.size()});
  lockstep::DataLoader loader(digits.train, sampler, transforms, {.batch_size = 64});

  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      auto loss = torch::nn::functional::cross_entropy(model->forward(batch.data), batch.target);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
    auto predicted = model->forward(transforms(digits.test.data)).argmax(1);
    auto accuracy = predicted.eq(digits.test.targets).to(at::kDouble).mean().item<double>();
    std::cout << "epoch " << epoch << ": accuracy " << accuracy << std::endl;
  }
}
