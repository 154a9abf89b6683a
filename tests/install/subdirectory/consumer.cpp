// A user's own program: two processes sum their ranks and train one step.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

#include "lockstep/lockstep.h"

int main() {
  if (lockstep::spawn(2)) return 0;
  auto world = lockstep::init();
  auto sum = torch::full({1}, static_cast<float>(world.rank() + 1));
  world.group().all_reduce(sum);

  lockstep::DistributedDataParallel model(torch::nn::Linear(4, 1), world.group());
  auto loss = torch::mse_loss(model(torch::ones({2, 4})), torch::zeros({2, 1}));
  loss.backward();
  if (world.rank() == 0)
    std::printf("consumer: %d ranks, sum %g\n", world.size(), sum.item<float>());
}
