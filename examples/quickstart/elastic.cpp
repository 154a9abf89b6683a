// distributed.cpp, beside this file, whose ranks live on when one of them dies:
//   build/examples/quickstart/elastic
// Kill a rank while it trains: `pkill -9 -n elastic` in another terminal. The other one goes on
// within some 0.1 s, and a new process takes the place of the dead. Each sample is used once in an
// epoch all the same.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  lockstep::ElasticJob job(2, {.max_restarts = 3});
  at::manual_seed(0);
  torch::nn::Sequential model{torch::nn::Linear(784, 128), torch::nn::ReLU(),
                              torch::nn::Linear(128, 10)};
  lockstep::set_num_threads_for(*model, 64);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  int64_t epoch = 0, samples = 0;  // How far training is.
  job.add("model", *model);
  job.add("optimizer", optimizer);
  job.add("epoch", epoch);
  job.add("samples", samples);

  auto digits = lockstep::load_dataset("digits");
  lockstep::Compose transforms = {lockstep::normalize(), lockstep::flatten()};

  job.run([&](lockstep::World& world) {
    lockstep::GradientAverager averager(*model, world.group());
    while (epoch < 20) {
      lockstep::DistributedSampler sampler({.dataset_size = digits.train.size(),
                                            .rank = world.rank(),
                                            .world_size = world.size(),
                                            .skip = samples});
      lockstep::DataLoader loader(digits.train, sampler, transforms, {.batch_size = 64});
      for (const auto& batch : loader.epoch(epoch)) {
        auto loss = torch::nn::functional::cross_entropy(model->forward(batch.data), batch.target);
        optimizer.zero_grad();
        loss.backward();
        optimizer.step();
        samples += batch.size() * world.size();
        job.commit();
      }
      auto predicted = model->forward(transforms(digits.test.data)).argmax(1);
      auto accuracy = predicted.eq(digits.test.targets).to(at::kDouble).mean().item<double>();
      std::cout << "epoch " << epoch << ", " << world.size() << " ranks: accuracy " << accuracy
                << std::endl;
      ++epoch;
      samples = 0;
    }
  });
}
