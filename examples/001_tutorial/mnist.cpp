// The tutorial's program without multiprocessing: a small convolutional network on MNIST, on one
// GPU or, where there is none, on the CPU.
//
//   build/examples/001_tutorial/mnist -n 1 -g 1 -nr 0
//
// It has no use for a second host; mnist_distributed.cpp has. On the first, at address IP:
//   MASTER_ADDR=IP build/examples/001_tutorial/mnist_distributed -n 2 -g 1 -nr 0
// and on the second:
//   MASTER_ADDR=IP build/examples/001_tutorial/mnist_distributed -n 2 -g 1 -nr 1
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "001_tutorial/convnet.h"
#include "001_tutorial/options.h"
#include "lockstep/lockstep.h"

namespace {

void train(const tutorial::Options& args) {
  const at::Device device(torch::cuda::is_available() ? at::kCUDA : at::kCPU);
  at::manual_seed(0);
  tutorial::ConvNet model;
  model->to(device);
  lockstep::set_num_threads_for(*model, args.batch_size);
  // The loss (cross-entropy) is a function here. The learning rate is the tutorial's.
  const auto parameters = model->parameters();
  const auto optimizer = lockstep::make_optimizer("sgd", parameters, {.lr = 1e-4});

  // Data loading code
  const auto train_dataset = examples::mnist(args.data).train;
  lockstep::DataLoader train_loader(
      train_dataset, lockstep::DistributedSampler({.dataset_size = train_dataset.size()}),
      {lockstep::to_float()}, {.batch_size = args.batch_size, .pin_memory = device.is_cuda()});

  const auto start = std::chrono::steady_clock::now();
  const auto total_step = static_cast<long long>(train_loader.batches_per_epoch());
  for (int epoch = 0; epoch < args.epochs; ++epoch) {
    for (const auto& batch : train_loader.epoch(epoch)) {
      const auto images = batch.data.to(device, /*non_blocking=*/true);
      const auto labels = batch.target.to(device, /*non_blocking=*/true);
      // Forward pass
      const auto outputs = model->forward(images);
      const auto loss = torch::nn::functional::cross_entropy(outputs, labels);

      // Backward and optimize
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      if ((batch.index + 1) % 100 == 0 || batch.index + 1 == total_step) {
        std::printf("Epoch [%d/%d], Step [%lld/%lld], Loss: %.4f\n", epoch + 1, args.epochs,
                    static_cast<long long>(batch.index + 1), total_step, loss.item<double>());
        std::fflush(stdout);
      }
    }
  }
  std::printf("Training complete in: %s\n",
              tutorial::duration_text(std::chrono::steady_clock::now() - start).c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  train(tutorial::read_options("The tutorial's ConvNet on MNIST in one process", argc, argv));
  return 0;
} catch (...) {
  return examples::report_error();
}
