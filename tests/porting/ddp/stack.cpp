// A module on the stack, which goes into a function by reference.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "lockstep/lockstep.h"
#include "tests/porting/weights.h"

struct Net : torch::nn::Module {
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(8, 16));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 2));
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(hidden(x))); }
};

using Ddp = lockstep::DistributedDataParallel<std::shared_ptr<Net>>;

void train(Ddp& net, torch::optim::Optimizer& optimizer, const at::Tensor& x, const at::Tensor& y) {
  for (int64_t i = 0; i + 16 <= x.size(0); i += 16) {
    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(net.forward(x.slice(0, i, i + 16)),
                                                     y.slice(0, i, i + 16));
    loss.backward();
    optimizer.step();
  }
}

int main(int argc, char** argv) {
  auto world = lockstep::init({.backend = argc > 1 ? argv[1] : "auto"});
  at::manual_seed(1);
  Ddp net(std::make_shared<Net>(), world.group());
  torch::optim::Adam optimizer(net.parameters(), 1e-2);
  auto x = at::randn({256, 8});
  x = x.chunk(world.size())[world.rank()];
  for (int epoch = 0; epoch < 3; ++epoch) train(net, optimizer, x, x.sum(1).gt(0).to(at::kLong));
  print_weights(net.parameters());
}
