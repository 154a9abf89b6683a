// An MLP on MNIST in one process, on one GPU or, where there is none, on the CPU: the foundation on
// which distributed_data_parallel.cpp, beside this file, builds.
//
//   build/examples/000_playground/single_gpu
//   build/examples/000_playground/single_gpu --data-dir DIR --epochs 5     (DIR holds MNIST)
//
// It has no use for a second host; distributed_data_parallel.cpp has. On the first, at address IP:
//   build/examples/000_playground/distributed_data_parallel -n 2 -g 1 -nr 0 -ip IP
// and on the second:
//   build/examples/000_playground/distributed_data_parallel -n 2 -g 1 -nr 1 -ip IP
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>

#include <cstdio>

#include "000_playground/mlp.h"
#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

struct Options {
  int epochs = 3;
  int64_t batch_size = 64;
  double lr = 0.01;
  examples::DataOptions data;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An MLP on MNIST in one process");
  flags.option("--epochs", options.epochs, "Passes over the data", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a step", {1});
  flags.option("--lr", options.lr, "Learning rate", {0});
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv);
  return options;
}

double accuracy(torch::nn::Sequential& model, lockstep::DataLoader& loader, at::Device device) {
  const at::NoGradGuard no_grad;
  int64_t correct = 0;
  for (const auto& batch : loader.epoch(0)) {
    const auto predicted = model->forward(batch.data.to(device)).argmax(1);
    correct += predicted.eq(batch.target.to(device)).sum().item<int64_t>();
  }
  return static_cast<double>(correct) / static_cast<double>(loader.samples_per_epoch());
}

void train(const Options& options) {
  const at::Device device(torch::cuda::is_available() ? at::kCUDA : at::kCPU);
  at::manual_seed(0);
  auto model = playground::make_mlp();
  model->to(device);
  lockstep::set_num_threads_for(*model, options.batch_size);
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
      const auto output = model->forward(batch.data.to(device));
      const auto loss = torch::nn::functional::cross_entropy(output, batch.target.to(device));
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      loss_sum += loss.item<double>();
    }
    std::printf("Epoch %d/%d loss %.4f test accuracy %.4f\n", epoch + 1, options.epochs,
                loss_sum / static_cast<double>(train_loader.batches_per_epoch()),
                accuracy(model, test_loader, device));
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
