// Two networks and two optimizers, one of which sees the other's output.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "lockstep/lockstep.h"
#include "tests/porting/weights.h"

int main(int argc, char** argv) {
  auto world = lockstep::init({.backend = argc > 1 ? argv[1] : "auto"});
  at::manual_seed(1);
  torch::nn::Sequential generator(torch::nn::Linear(3, 16), torch::nn::Tanh(),
                                  torch::nn::Linear(16, 2));
  torch::nn::Sequential discriminator(torch::nn::Linear(2, 16), torch::nn::Tanh(),
                                      torch::nn::Linear(16, 1));
  lockstep::DistributedDataParallel ddp_generator(generator, world.group());
  lockstep::DistributedDataParallel ddp_discriminator(discriminator, world.group());
  torch::optim::Adam of_generator(generator->parameters(), 1e-3);
  torch::optim::Adam of_discriminator(discriminator->parameters(), 1e-3);
  auto real = at::randn({64, 2}) * 0.5 + 1;
  real = real.chunk(world.size())[world.rank()];
  at::manual_seed(2 + world.rank());  // other noise on each rank
  for (int step = 0; step < 20; ++step) {
    discriminator->zero_grad();
    ddp_discriminator.forward(real).sigmoid().log().neg().mean().backward();
    auto fake = ddp_generator.forward(at::randn({32, 3}));
    ddp_discriminator.forward(fake.detach()).sigmoid().neg().add(1).log().neg().mean().backward();
    of_discriminator.step();
    generator->zero_grad();
    discriminator->forward(fake).sigmoid().log().neg().mean().backward();
    of_generator.step();
  }
  auto parameters = generator->parameters();
  for (const auto& parameter : discriminator->parameters()) parameters.push_back(parameter);
  print_weights(parameters);
}
