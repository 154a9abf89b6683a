// single_gpu.cpp with DataParallel: one process, in which each batch is cut into a part for each
// GPU. A replica of the MLP runs on each part at the same time. Without GPUs the replicas run in
// threads, one for each core.
//
//   build/examples/000_playground/data_parallel
//   build/examples/000_playground/data_parallel --replicas 4 --batch-size 256
//
// It knows one host only, and its replicas share one process. On several hosts, and mostly on one
// as well, distributed_data_parallel.cpp is the better choice. On the first host, at address IP:
//   build/examples/000_playground/distributed_data_parallel -n 2 -g 2 -nr 0 -ip IP
// and on the second:
//   build/examples/000_playground/distributed_data_parallel -n 2 -g 2 -nr 1 -ip IP
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "000_playground/mlp.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"
#include "lockstep/parallel/data_parallel/data_parallel.h"

namespace {

struct Options {
  int epochs = 3;
  int64_t batch_size = 64;
  double lr = 0.01;
  int64_t replicas = 0;
  examples::DataOptions data;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An MLP on MNIST with DataParallel");
  flags.option("--epochs", options.epochs, "Passes over the data", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a step, of all replicas", {1});
  flags.option("--lr", options.lr, "Learning rate", {0});
  flags.option("--replicas", options.replicas,
               "Replicas on the CPU; 0: one for each core (on GPUs always one for each)", {0, 256});
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv);
  return options;
}

/// The one line that differs from a program for one GPU.
lockstep::DataParallel<torch::nn::Sequential> in_parallel(torch::nn::Sequential& model,
                                                          const Options& options) {
  lockstep::DataParallelOptions parallel;
  if (!torch::cuda::is_available()) {
    parallel.devices.resize(static_cast<size_t>(options.replicas), at::kCPU);
  }
  return lockstep::DataParallel<torch::nn::Sequential>(model, parallel);
}

double accuracy(lockstep::DataParallel<torch::nn::Sequential>& model, lockstep::DataLoader& loader,
                at::Device device) {
  const at::NoGradGuard no_grad;
  int64_t correct = 0;
  for (const auto& batch : loader.epoch(0)) {
    const auto predicted = model.forward(batch.data.to(device)).argmax(1);
    correct += predicted.eq(batch.target.to(device)).sum().item<int64_t>();
  }
  return static_cast<double>(correct) / static_cast<double>(loader.samples_per_epoch());
}

void train(const Options& options) {
  const at::Device device(torch::cuda::is_available() ? at::kCUDA : at::kCPU);
  at::manual_seed(0);
  auto model = playground::make_mlp();
  model->to(device);
  auto parallel = in_parallel(model, options);
  // The gradients of all replicas add up in the module's own parameters.
  const auto parameters = model->parameters();
  const auto optimizer =
      lockstep::make_optimizer("sgd", parameters, {.lr = options.lr, .momentum = 0.9});

  const auto splits = examples::mnist(options.data);
  const lockstep::Compose transforms = {lockstep::normalize(), lockstep::flatten()};
  lockstep::DataLoader train_loader(
      splits.train, lockstep::DistributedSampler({.dataset_size = splits.train.size()}), transforms,
      {.batch_size = options.batch_size});
  lockstep::DataLoader test_loader(
      splits.test,
      lockstep::DistributedSampler({.dataset_size = splits.test.size(), .shuffle = false}),
      transforms, {.batch_size = 1000});

  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    double loss_sum = 0;
    for (const auto& batch : train_loader.epoch(epoch)) {
      const auto output = parallel.forward(batch.data.to(device));
      const auto loss = torch::nn::functional::cross_entropy(output, batch.target.to(device));
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      loss_sum += loss.item<double>();
    }
    std::printf("Epoch %d/%d loss %.4f test accuracy %.4f (%zu replicas)\n", epoch + 1,
                options.epochs, loss_sum / static_cast<double>(train_loader.batches_per_epoch()),
                accuracy(parallel, test_loader, device), parallel.devices().size());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  train(read_options(argc, argv));
  return 0;
} catch (...) {
  return examples::report_error();
}
