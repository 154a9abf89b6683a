// comm_consumer METHOD RANK SIZE: sums the ranks, counted from 1.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <cstdio>
#include <cstdlib>

#include "lockstep/comm/world.h"

int main(int, char** argv) {
  lockstep::InitOptions options;
  options.init_method = argv[1];
  options.rank = std::atoi(argv[2]);
  options.world_size = std::atoi(argv[3]);
  const auto world = lockstep::init(options);
  auto sum = at::full({1}, world.rank() + 1.0);
  world.group().all_reduce(sum);
  std::printf("comm_consumer: %d ranks, sum %g\n", world.size(), sum.item<float>());
}
