// A forward that returns a struct.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "lockstep/lockstep.h"
#include "tests/porting/weights.h"

struct Output {
  at::Tensor logits;
  at::Tensor features;
  int64_t samples = 0;
};

struct NetImpl : torch::nn::Module {
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(8, 16));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(16, 2));
  Output forward(const at::Tensor& x) {
    auto features = at::tanh(hidden(x));
    return {last(features), features, x.size(0)};
  }
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  auto world = lockstep::init({.backend = argc > 1 ? argv[1] : "auto"});
  at::manual_seed(1);
  Net net;
  lockstep::DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = true});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto x = at::randn({64, 8});
  x = x.chunk(world.size())[world.rank()];
  auto y = x.sum(1).gt(0).to(at::kLong);
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    auto output = ddp.forward(x);
    auto loss = torch::nn::functional::cross_entropy(output.logits, y) +
                1e-3 * output.features.square().sum() / static_cast<double>(output.samples);
    loss.backward();
    optimizer.step();
  }
  print_weights(net->parameters());
}
