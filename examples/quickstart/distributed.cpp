// A program of your own on several processes: an MLP on the built-in digits. A diff with
// single.cpp, beside this file, shows the lines that make it so. It starts two processes of itself:
//   P=build/examples/quickstart/distributed
//   $P
// A launcher, `lockstep run`, torchrun or mpirun, starts as many as you like:
//   build/bin/lockstep run --nproc-per-node 4 $P
//   mpirun -np 2 $P
// On two hosts, IP being the address of the first; there:
//   HOSTS="--nnodes 2 --nproc-per-node 2 --master-addr IP --master-port 29500"
//   build/bin/lockstep run $HOSTS --node-rank 0 $P
// and the same on the second with --node-rank 1.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  auto world = lockstep::start(2);
  at::manual_seed(0);
  torch::nn::Sequential model{torch::nn::Linear(784, 128), torch::nn::ReLU(),
                              torch::nn::Linear(128, 10)};
  lockstep::set_num_threads_for(*model, 64);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  lockstep::GradientAverager averager(*model, world.group());

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
    }
    auto predicted = model->forward(transforms(digits.test.data)).argmax(1);
    auto accuracy = predicted.eq(digits.test.targets).to(at::kDouble).mean().item<double>();
    std::cout << "epoch " << epoch << ": accuracy " << accuracy << std::endl;
  }
}
