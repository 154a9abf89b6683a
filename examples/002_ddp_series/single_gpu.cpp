// Part 1 of the series: a training job on one GPU or, where there is none, on the CPU. The other
// two programs of this folder make it distributed.
//
//   build/examples/002_ddp_series/single_gpu 50 10
//   build/examples/002_ddp_series/single_gpu 50 10 --batch_size 64
//
// It has no use for a second host; multigpu_torchrun.cpp, beside this file, runs on two.
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdio>

#include "002_ddp_series/datautils.h"
#include "lockstep/lockstep.h"

namespace {

class Trainer {
 public:
  Trainer(torch::nn::Linear model, lockstep::DataLoader train_data,
          std::unique_ptr<lockstep::Optimizer> optimizer, int gpu_id, int save_every)
      : gpu_id_(gpu_id),
        device_(torch::cuda::is_available()
                    ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu_id))
                    : at::Device(at::kCPU)),
        model_(std::move(model)),
        train_data_(std::move(train_data)),
        optimizer_(std::move(optimizer)),
        save_every_(save_every) {}

  void train(int max_epochs) {
    for (int epoch = 0; epoch < max_epochs; ++epoch) {
      run_epoch(epoch);
      if (epoch % save_every_ == 0) save_checkpoint(epoch);
    }
  }

 private:
  void run_batch(const at::Tensor& source, const at::Tensor& targets) {
    lockstep::zero_grad(model_->parameters());
    const auto output = model_->forward(source);
    // The series takes cross-entropy here, over the one output that the model has. The softmax of
    // one number is 1, so that loss is 0 whatever the weights, and nothing would be learnt.
    const auto loss = torch::nn::functional::mse_loss(output, targets);
    loss.backward();
    optimizer_->step();
  }

  void run_epoch(int epoch) {
    const auto batch_size =
        std::min(train_data_.options().batch_size, train_data_.samples_per_epoch());
    std::printf("[GPU%d] Epoch %d | Batchsize: %lld | Steps: %lld\n", gpu_id_, epoch,
                static_cast<long long>(batch_size),
                static_cast<long long>(train_data_.batches_per_epoch()));
    std::fflush(stdout);
    for (const auto& batch : train_data_.epoch(epoch)) {
      run_batch(batch.data.to(device_), batch.target.to(device_));
    }
  }

  void save_checkpoint(int epoch) {
    const char* path = "checkpoint.safetensors";
    lockstep::save_safetensors(path, lockstep::state_dict(*model_));
    std::printf("Epoch %d | Training checkpoint saved at %s\n", epoch, path);
  }

  int gpu_id_;
  at::Device device_;
  torch::nn::Linear model_;
  lockstep::DataLoader train_data_;
  std::unique_ptr<lockstep::Optimizer> optimizer_;
  int save_every_;
};

lockstep::DataLoader prepare_dataloader(const lockstep::TensorDataset& dataset,
                                        int64_t batch_size) {
  return lockstep::DataLoader(
      dataset, lockstep::DistributedSampler({.dataset_size = dataset.size()}), {},
      {.batch_size = batch_size, .pin_memory = torch::cuda::is_available()});
}

void run(int device, const series::Args& args) {
  at::manual_seed(0);
  const auto dataset = series::make_train_dataset(2048);  // load your dataset
  torch::nn::Linear model(20, 1);                         // load your model
  if (torch::cuda::is_available())
    model->to(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  lockstep::set_num_threads_for(*model, args.batch_size);
  auto optimizer = lockstep::make_optimizer("sgd", model->parameters(), {.lr = 1e-3});
  Trainer trainer(model, prepare_dataloader(dataset, args.batch_size), std::move(optimizer), device,
                  args.save_every);
  trainer.train(args.total_epochs);
}

}  // namespace

int main(int argc, char** argv) try {
  const int device = 0;  // cuda:0, or the CPU
  run(device, series::read_args(argc, argv));
  return 0;
} catch (...) {
  return examples::report_error();
}
