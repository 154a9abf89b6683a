// An MLP on MNIST whose first chunk lies on one GPU and whose second on another: model parallelism,
// for a model that is too large for one device. One process. Without GPUs both chunks are on the
// CPU.
//
//   build/examples/000_playground/model_parallel
//   build/examples/000_playground/model_parallel --pipelined
//
// By itself one chunk waits while the other works. With --pipelined each batch is cut into parts:
// while the second chunk works on a part, the first works on the next one. That gives the outputs
// of the whole batch, but costs more operations, so it pays for large batches only. The chunks of a
// pipeline may also be processes, on several hosts; for two, at IP, as `lockstep train` knows it:
//   lockstep run --nnodes 2 --node-rank 0 --master-addr IP lockstep train --strategy pipeline
// and the same with --node-rank 1 on the second.
#include <ATen/ThreadLocalState.h>
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <future>

#include "common/data.h"
#include "common/program.h"
#include "lockstep/lockstep.h"

namespace {

struct Options {
  int epochs = 3;
  int64_t batch_size = 64;
  double lr = 0.01;
  bool pipelined = false;
  int64_t split_size = 16;
  examples::DataOptions data;
};

Options read_options(int argc, char** argv) {
  Options options;
  examples::Flags flags("An MLP on MNIST whose chunks lie on two devices");
  flags.option("--epochs", options.epochs, "Passes over the data", {0});
  flags.option("--batch-size", options.batch_size, "Samples of a step", {1});
  flags.option("--lr", options.lr, "Learning rate", {0});
  flags.flag("--pipelined", options.pipelined,
             "Cut batches, so that both chunks work at the same time");
  flags.option("--split-size", options.split_size, "With --pipelined: samples of a part", {1});
  examples::add_data_flags(flags, options.data);
  examples::parse(flags, argc, argv);
  return options;
}

/// The folder's MLP in two chunks.
class ModelParallelMlp : public torch::nn::Module {
 public:
  ModelParallelMlp(at::Device first, at::Device second)
      : first_(first),
        second_(second),
        chunk1_(torch::nn::Linear(28 * 28, 128), torch::nn::ReLU()),
        chunk2_(torch::nn::Linear(128, 64), torch::nn::ReLU(), torch::nn::Linear(64, 10)) {
    register_module("chunk1", chunk1_)->to(first);
    register_module("chunk2", chunk2_)->to(second);
  }

  at::Tensor forward(const at::Tensor& x) {
    return chunk2_->forward(chunk1_->forward(x.to(first_)).to(second_));
  }

  /// The same, part by part. A thread runs the first chunk ahead, so that both work at once. (GPUs
  /// would do so without it, as they run behind the program.)
  at::Tensor pipelined(const at::Tensor& x, int64_t split_size) {
    const auto parts = x.to(first_).split(split_size);
    std::vector<std::promise<at::Tensor>> hidden(parts.size());
    // With this thread's grad mode. Its end is waited for when `ahead` goes.
    [[maybe_unused]] const auto ahead =
        std::async(std::launch::async, at::wrapPropagateTLSState([&] {
                     for (size_t i = 0; i < parts.size(); ++i) {
                       try {
                         hidden[i].set_value(chunk1_->forward(parts[i]).to(second_));
                       } catch (...) {
                         hidden[i].set_exception(std::current_exception());
                       }
                     }
                   }));
    std::vector<at::Tensor> outputs;
    for (auto& part : hidden) outputs.push_back(chunk2_->forward(part.get_future().get()));
    return at::cat(outputs);
  }

 private:
  at::Device first_;
  at::Device second_;
  torch::nn::Sequential chunk1_;
  torch::nn::Sequential chunk2_;
};

double accuracy(ModelParallelMlp& model, lockstep::DataLoader& loader) {
  const at::NoGradGuard no_grad;
  int64_t correct = 0;
  for (const auto& batch : loader.epoch(0)) {
    const auto predicted = model.forward(batch.data).argmax(1);
    correct += predicted.eq(batch.target.to(predicted.device())).sum().item<int64_t>();
  }
  return static_cast<double>(correct) / static_cast<double>(loader.samples_per_epoch());
}

void train(const Options& options) {
  const auto device = [](at::DeviceIndex index) {
    const at::DeviceIndex gpus = torch::cuda::device_count();
    if (gpus == 0) return at::Device(at::kCPU);
    return at::Device(at::kCUDA, index < gpus ? index : at::DeviceIndex{0});
  };
  at::manual_seed(0);
  auto model = std::make_shared<ModelParallelMlp>(device(0), device(1));
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
      const auto output = options.pipelined ? model->pipelined(batch.data, options.split_size)
                                            : model->forward(batch.data);
      // The loss is where the last chunk is. Backward goes back through both devices by itself.
      const auto loss =
          torch::nn::functional::cross_entropy(output, batch.target.to(output.device()));
      lockstep::zero_grad(parameters);
      loss.backward();
      optimizer->step();
      loss_sum += loss.item<double>();
    }
    std::printf("Epoch %d/%d loss %.4f test accuracy %.4f (%s)\n", epoch + 1, options.epochs,
                loss_sum / static_cast<double>(train_loader.batches_per_epoch()),
                accuracy(*model, test_loader), options.pipelined ? "pipelined" : "chunk by chunk");
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
