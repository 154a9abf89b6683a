// Does not compile: DistributedDataParallel keeps its module, which a raw pointer cannot.
#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"

int main() {
  auto world = lockstep::init();
  torch::nn::LinearImpl net(2, 1);
  lockstep::DistributedDataParallel ddp(&net, world.group());
}
