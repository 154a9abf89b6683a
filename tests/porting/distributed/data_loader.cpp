// LibTorch's own data set and loader, and numbers that are counted over an epoch.
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/random.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "lockstep/lockstep.h"
#include "tests/porting/weights.h"

struct Points : torch::data::datasets::Dataset<Points> {
  at::Tensor x = at::randn({200, 8});
  torch::data::Example<> get(size_t index) override {
    auto row = x[static_cast<int64_t>(index)];
    return {row, row.sum().gt(0).to(at::kLong)};
  }
  std::optional<size_t> size() const override { return 200; }
};

int main(int argc, char** argv) {
  auto world = lockstep::init({.backend = argc > 1 ? argv[1] : "auto"});
  at::manual_seed(1);
  torch::nn::Linear model(8, 2);
  lockstep::GradientAverager averager(*model, world.group());
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto data = Points().map(torch::data::transforms::Stack<>());
  auto sampler = lockstep::torch_sampler(data.size(), world);
  auto loader = torch::data::make_data_loader(data, std::move(sampler), 10);
  for (int epoch = 0; epoch < 3; ++epoch) {
    double loss_sum = 0;
    int64_t correct = 0;
    size_t seen = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      auto output = model->forward(batch.data);
      auto loss = torch::nn::functional::cross_entropy(output, batch.target);
      loss.backward();
      optimizer.step();
      loss_sum += loss.item<double>() * static_cast<double>(batch.data.size(0));
      correct += output.argmax(1).eq(batch.target).sum().item<int64_t>();
      seen += static_cast<size_t>(batch.data.size(0));
    }
    world.group().all_reduce_values(loss_sum, correct, seen);
    std::printf("epoch %d: loss %.6f, %lld of %zu right\n", epoch,
                loss_sum / static_cast<double>(seen), static_cast<long long>(correct), seen);
  }
  print_weights(model->parameters());
}
