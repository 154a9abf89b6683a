// The tutorial's program with multiprocessing: mnist.cpp on -n machines with -g processes each. The
// new code is fenced off, as in the tutorial.
//
// One host, two processes:
//   build/examples/001_tutorial/mnist_distributed -n 1 -g 2 -nr 0
// Two hosts with two processes each, IP being the address of the first; there:
//   MASTER_ADDR=IP build/examples/001_tutorial/mnist_distributed -n 2 -g 2 -nr 0
// and on the second:
//   MASTER_ADDR=IP build/examples/001_tutorial/mnist_distributed -n 2 -g 2 -nr 1
//
// The tutorial writes the first host's address into the program; here MASTER_ADDR and MASTER_PORT
// of the environment win over the address (this host) and port (8888) that are built in.
//
// The effective batch size is the batch size of a process times the number of processes.
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "001_tutorial/convnet.h"
#include "001_tutorial/options.h"
#include "lockstep/lockstep.h"

namespace {

void train(int gpu, const tutorial::Options& args) {
  //////////////////////////////////////////////////////////////////////
  // Join up with the other processes: blocks until all have come. The rank
  // (args.nr * args.gpus + gpu) and the number of processes, which spawn() knows, come through the
  // environment.
  const auto world = lockstep::init({.backend = args.backend, .init_method = "env://"});
  //////////////////////////////////////////////////////////////////////

  const at::Device device = world.device();
  at::manual_seed(0);
  tutorial::ConvNet model;
  model->to(device);
  const auto parameters = model->parameters();
  const auto optimizer = lockstep::make_optimizer("sgd", parameters, {.lr = 1e-4});

  //////////////////////////////////////////////////////////////////////
  // Wrap the model
  lockstep::DistributedDataParallel ddp_model(model, world.group());
  //////////////////////////////////////////////////////////////////////

  // Data loading code
  const auto train_dataset = examples::mnist(args.data).train;

  //////////////////////////////////////////////////////////////////////
  // Each process gets another slice of the training data.
  const lockstep::DistributedSampler train_sampler(
      {.dataset_size = train_dataset.size(), .rank = world.rank(), .world_size = world.size()});
  //////////////////////////////////////////////////////////////////////

  lockstep::DataLoader train_loader(
      train_dataset, train_sampler, {lockstep::to_float()},
      {.batch_size = args.batch_size, .pin_memory = device.is_cuda()});

  const auto start = std::chrono::steady_clock::now();
  const auto total_step = static_cast<long long>(train_loader.batches_per_epoch());
  for (int epoch = 0; epoch < args.epochs; ++epoch) {
    // The tutorial forgets set_epoch, and so shuffles every epoch alike; here epoch() asks for it.
    for (const auto& batch : train_loader.epoch(epoch)) {
      const auto images = batch.data.to(device, /*non_blocking=*/true);
      const auto labels = batch.target.to(device, /*non_blocking=*/true);
      // Forward pass
      const auto outputs = ddp_model.forward(images);
      const auto loss = torch::nn::functional::cross_entropy(outputs, labels);

      // Backward and optimize: loss.backward() averages the gradients over all processes.
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
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
  const auto args = tutorial::read_options(
      "The tutorial's ConvNet on MNIST with DistributedDataParallel", argc, argv);
  //////////////////////////////////////////////////////////////////////
  lockstep::SpawnOptions options;
  options.world_size = args.gpus * args.nodes;
  options.first_rank = args.nr * args.gpus;
  options.master_addr = lockstep::env_string("MASTER_ADDR").value_or("127.0.0.1");
  options.master_port = static_cast<int>(lockstep::env_int("MASTER_PORT", 1, 65535).value_or(8888));
  lockstep::spawn([&](int gpu) { train(gpu, args); }, args.gpus, options);
  //////////////////////////////////////////////////////////////////////
  return 0;
} catch (...) {
  return examples::report_error();
}
