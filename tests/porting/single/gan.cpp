// Two networks and two optimizers, one of which sees the other's output.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "tests/porting/weights.h"

int main(int argc, char** argv) {
  at::manual_seed(1);
  torch::nn::Sequential generator(torch::nn::Linear(3, 16), torch::nn::Tanh(),
                                  torch::nn::Linear(16, 2));
  torch::nn::Sequential discriminator(torch::nn::Linear(2, 16), torch::nn::Tanh(),
                                      torch::nn::Linear(16, 1));
  torch::optim::Adam of_generator(generator->parameters(), 1e-3);
  torch::optim::Adam of_discriminator(discriminator->parameters(), 1e-3);
  auto real = at::randn({64, 2}) * 0.5 + 1;
  for (int step = 0; step < 20; ++step) {
    discriminator->zero_grad();
    discriminator->forward(real).sigmoid().log().neg().mean().backward();
    auto fake = generator->forward(at::randn({32, 3}));
    discriminator->forward(fake.detach()).sigmoid().neg().add(1).log().neg().mean().backward();
    of_discriminator.step();
    generator->zero_grad();
    discriminator->forward(fake).sigmoid().log().neg().mean().backward();
    of_generator.step();
  }
  auto parameters = generator->parameters();
  for (const auto& parameter : discriminator->parameters()) parameters.push_back(parameter);
  print_weights(parameters);
}
