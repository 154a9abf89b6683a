// A forward that returns a class whose tensors nobody can know, where they must be visited.
#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"

class Hidden {
 public:
  explicit Hidden(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

struct NetImpl : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(2, 1));
  Hidden forward(const at::Tensor& x) { return Hidden(layer(x)); }
};
TORCH_MODULE(Net);

int main() {
  auto world = lockstep::init();
  Net net;
  lockstep::DistributedDataParallel plain(net, world.group());
  plain.forward(at::ones({4, 2})).tensor().sum().backward();  // Nobody needs to see them.
  std::puts("plain");
  lockstep::DistributedDataParallel ddp(net, world.group(), {.find_unused_parameters = true});
  try {
    ddp.forward(at::ones({4, 2}));
  } catch (const lockstep::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
