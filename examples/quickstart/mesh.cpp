// Two parallelisms put together by hand, on four ranks: an MLP in two stages of a pipeline, each of
// which FSDP cuts over two ranks. Each parallelism has a group of the mesh, and the model is this
// rank's stage. A step is gpipe's: all forwards, then all backwards.
//   build/examples/quickstart/mesh
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

#include "lockstep/lockstep.h"

int main() {
  auto world = lockstep::start(4);
  auto mesh = lockstep::init_device_mesh(world.group(), "pp=2,dp_shard=2");
  const lockstep::ProcessGroup& pp = mesh.get_group("pp");
  const bool first = pp.rank() == 0;
  at::manual_seed(pp.rank());
  torch::nn::Sequential stage;
  stage->push_back(first ? torch::nn::Linear(784, 128) : torch::nn::Linear(128, 10));
  if (first) stage->push_back(torch::nn::ReLU());
  lockstep::FullyShardedDataParallel fsdp(stage, mesh.get_group("dp_shard"));
  auto optimizer = lockstep::make_optimizer("adam", fsdp.parameters(), {.lr = 1e-3});

  auto digits = lockstep::load_dataset("digits");
  lockstep::Compose transforms = {lockstep::normalize(), lockstep::flatten()};
  const lockstep::ProcessGroup& dp = mesh.get_group("dp_shard");
  lockstep::DistributedSampler sampler({digits.train.size(), dp.rank(), dp.size()});
  lockstep::DataLoader loader(digits.train, sampler, transforms, {.batch_size = 64});

  constexpr int64_t kParts = 4;  // Micro-batches of a batch.
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    double sum = 0;
    int batches = 0;
    for (const auto& batch : loader.epoch(epoch)) {
      const auto data = batch.data.chunk(kParts), target = batch.target.chunk(kParts);
      std::vector<at::Tensor> inputs, outputs;
      const auto forward = [&](size_t i) {
        inputs.push_back(first ? data[i] : at::empty({data[i].size(0), 128}));
        if (!first) pp.recv(inputs[i], 0);
        outputs.push_back(fsdp.forward(inputs[i].requires_grad_(!first)));
        if (first) pp.send(outputs[i].detach(), 1);
      };
      const auto backward = [&](size_t i) {
        if (first) {
          auto gradient = at::empty_like(outputs[i]);
          pp.recv(gradient, 1);
          return outputs[i].backward(gradient);
        }
        auto loss = torch::nn::functional::cross_entropy(outputs[i], target[i]);
        (loss / kParts).backward();
        sum += loss.item<double>();
        pp.send(inputs[i].grad(), 0);
      };
      {
        const auto whole = fsdp.full_parameters();  // Gathered once for all micro-batches.
        for (size_t i = 0; i < data.size(); ++i) forward(i);
        for (size_t i = 0; i + 1 < data.size(); ++i) {
          const auto adds_up = fsdp.no_sync();
          backward(i);
        }
        backward(data.size() - 1);  // Averages the gradients.
      }
      optimizer->step();
      lockstep::zero_grad(fsdp.parameters());
      ++batches;
    }
    world.group().all_reduce_values(sum);  // The last stages have it.
    std::cout << "epoch " << epoch << ": loss " << sum / (4 * dp.size() * batches) << std::endl;
  }
}
