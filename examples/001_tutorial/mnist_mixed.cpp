// The tutorial's program with mixed precision: mnist_distributed.cpp with Apex's four lines. The
// new code is fenced off, as in the tutorial.
//
// One host, two processes, at the tutorial's level O2:
//   build/examples/001_tutorial/mnist_mixed -n 1 -g 2 -nr 0
// At another level, and with a fixed scale of the loss in place of one that follows the gradients:
//   build/examples/001_tutorial/mnist_mixed -g 2 --opt-level O1 --loss-scale 128
// Two hosts with two processes each, IP being the address of the first; there:
//   MASTER_ADDR=IP build/examples/001_tutorial/mnist_mixed -n 2 -g 2 -nr 0
// and on the second:
//   MASTER_ADDR=IP build/examples/001_tutorial/mnist_mixed -n 2 -g 2 -nr 1
//
// | level | parameters                          | computes in                     |
// |-------|-------------------------------------|---------------------------------|
// | O0    | float32                             | float32                         |
// | O1    | float32                             | each operation in what suits it |
// | O2    | float16 with float32 copies, batch  | float16                         |
// |       | norm's in float32                   |                                 |
// | O3    | float16                             | float16                         |
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "001_tutorial/convnet.h"
#include "001_tutorial/options.h"
#include "lockstep/lockstep.h"

namespace {

void train(int gpu, const tutorial::Options& args) {
  const auto world = lockstep::init({.backend = args.backend, .init_method = "env://"});
  const at::Device device = world.device();
  at::manual_seed(0);
  tutorial::ConvNet model;
  model->to(device);
  //////////////////////////////////////////////////////////////////////
  // Wrap the model and the optimizer
  lockstep::Precision precision(
      {.amp_level = args.opt_level, .loss_scale = args.loss_scale, .device = device});
  if (world.rank() == 0 && !precision.slow_because().empty()) {
    lockstep::log_warning(precision.slow_because());
  }
  precision.convert(*model);
  const auto parameters = model->parameters();
  const auto optimizer = precision.optimizer_factory([](std::vector<at::Tensor> tensors) {
    return lockstep::make_optimizer("sgd", std::move(tensors), {.lr = 1e-4});
  })(parameters);
  lockstep::DistributedDataParallel ddp_model(model, world.group());
  //////////////////////////////////////////////////////////////////////

  // Data loading code
  const auto train_dataset = examples::mnist(args.data).train;
  const lockstep::DistributedSampler train_sampler(
      {.dataset_size = train_dataset.size(), .rank = world.rank(), .world_size = world.size()});
  lockstep::DataLoader train_loader(
      train_dataset, train_sampler, {lockstep::to_float()},
      {.batch_size = args.batch_size, .pin_memory = device.is_cuda()});

  const auto start = std::chrono::steady_clock::now();
  const auto total_step = static_cast<long long>(train_loader.batches_per_epoch());
  for (int epoch = 0; epoch < args.epochs; ++epoch) {
    for (const auto& batch : train_loader.epoch(epoch)) {
      const auto images = batch.data.to(device, /*non_blocking=*/true);
      const auto labels = batch.target.to(device, /*non_blocking=*/true);
      //////////////////////////////////////////////////////////////////////
      // Forward pass
      at::Tensor loss;
      {
        const auto autocast = precision.autocast();
        const auto outputs = ddp_model.forward(precision.convert_input(images));
        loss = torch::nn::functional::cross_entropy(precision.convert_output(outputs), labels);
      }

      // Backward and optimize: a step whose gradients overflow is skipped.
      lockstep::zero_grad(parameters);
      precision.scale(loss).backward();
      precision.step(*optimizer);
      //////////////////////////////////////////////////////////////////////
      const bool last = batch.index + 1 == total_step;
      if (((batch.index + 1) % 100 == 0 || last) && gpu == 0) {
        std::printf("Epoch [%d/%d], Step [%lld/%lld], Loss: %.4f\n", epoch + 1, args.epochs,
                    static_cast<long long>(batch.index + 1), total_step, loss.item<double>());
        std::fflush(stdout);
      }
    }
  }
  if (gpu == 0) {
    std::printf("Training complete in: %s\n",
                tutorial::duration_text(std::chrono::steady_clock::now() - start).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const auto args = tutorial::read_options("The tutorial's ConvNet on MNIST in mixed precision",
                                           argc, argv, /*mixed=*/true);
  lockstep::SpawnOptions options;
  options.world_size = args.gpus * args.nodes;
  options.first_rank = args.nr * args.gpus;
  options.master_addr = lockstep::env_string("MASTER_ADDR").value_or("127.0.0.1");
  options.master_port = static_cast<int>(lockstep::env_int("MASTER_PORT", 1, 65535).value_or(8888));
  lockstep::spawn([&](int gpu) { train(gpu, args); }, args.gpus, options);
  return 0;
} catch (...) {
  return examples::report_error();
}
