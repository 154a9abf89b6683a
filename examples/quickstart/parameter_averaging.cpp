// Ranks that train by themselves and average their parameters now and then: less communication than
// averaging gradients in every step (local SGD). It starts two processes of itself:
//   build/examples/quickstart/parameter_averaging
//   build/bin/lockstep run --nproc-per-node 4 build/examples/quickstart/parameter_averaging
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

#include "lockstep/lockstep.h"
#include "lockstep/parallel/averaging/averagers.h"

int main() {
  auto world = lockstep::start(2);
  at::manual_seed(0);  // The ranks begin with the same weights.
  torch::nn::Sequential model{torch::nn::Linear(784, 128), torch::nn::ReLU(),
                              torch::nn::Linear(128, 10)};
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  // Every 8th step, from the first on.
  lockstep::PeriodicModelAverager averager(8, 0, world.group());

  auto digits = lockstep::load_dataset("digits");
  lockstep::Compose transforms = {lockstep::normalize(), lockstep::flatten()};
  lockstep::DistributedSampler sampler({digits.train.size(), world.rank(), world.size()});
  lockstep::DataLoader loader(digits.train, sampler, transforms, {.batch_size = 64});

  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    for (const auto& batch : loader.epoch(epoch)) {
      auto loss = torch::nn::functional::cross_entropy(model->forward(batch.data), batch.target);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      averager.average_parameters(model->parameters());
    }
    auto predicted = model->forward(transforms(digits.test.data)).argmax(1);
    auto accuracy = predicted.eq(digits.test.targets).to(at::kDouble).mean().item<double>();
    if (world.rank() == 0) {
      std::cout << "epoch " << epoch << ": accuracy " << accuracy << std::endl;
    }
  }
}
