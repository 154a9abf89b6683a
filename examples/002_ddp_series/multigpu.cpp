// Part 2 of the series: single_gpu.cpp on all GPUs of one host. The program spawns a process a GPU
// itself; where there is no GPU, two processes share the CPU, or as many as --devices says.
//
// One host:
//   build/examples/002_ddp_series/multigpu 50 10
//   build/examples/002_ddp_series/multigpu 50 10 --batch_size 64 --devices 4
// Two hosts: a program that spawns its own processes knows of one host only; give the same job to a
// launcher, as multigpu_torchrun.cpp does. IP being the address of the first, there:
//   P=build/examples/002_ddp_series/multigpu_torchrun
//   HOSTS="--nnodes 2 --nproc-per-node 2 --master-addr IP --master-port 29500"
//   build/bin/lockstep run $HOSTS --node-rank 0 $P 50 10
// and the same on the second with --node-rank 1.
//
// MASTER_ADDR and MASTER_PORT of the environment win over localhost and 12355.
#include <ATen/Context.h>
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
          std::unique_ptr<lockstep::Optimizer> optimizer, const lockstep::World& world,
          int save_every)
      : gpu_id_(world.local_rank()),
        device_(world.device()),
        model_(std::move(model), world.group()),
        train_data_(std::move(train_data)),
        optimizer_(std::move(optimizer)),
        save_every_(save_every) {}

  void train(int max_epochs) {
    for (int epoch = 0; epoch < max_epochs; ++epoch) {
      run_epoch(epoch);
      // All ranks have the same weights: one of them saves.
      if (gpu_id_ == 0 && epoch % save_every_ == 0) save_checkpoint(epoch);
    }
  }

 private:
  void run_batch(const at::Tensor& source, const at::Tensor& targets) {
    lockstep::zero_grad(model_.module().parameters());
    const auto output = model_.forward(source);
    // Not the series' cross-entropy, which is always 0 over one output: see single_gpu.cpp.
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
    // The series calls sampler.set_epoch(epoch) here; epoch() takes the number, so that it cannot
    // be forgotten.
    for (const auto& batch : train_data_.epoch(epoch)) {
      run_batch(batch.data.to(device_), batch.target.to(device_));
    }
  }

  void save_checkpoint(int epoch) {
    const char* path = "checkpoint.safetensors";
    // module(): the wrapped model, whose tensors have their own names.
    lockstep::save_safetensors(path, lockstep::state_dict(model_.module()));
    std::printf("Epoch %d | Training checkpoint saved at %s\n", epoch, path);
  }

  int gpu_id_;
  at::Device device_;
  lockstep::DistributedDataParallel<torch::nn::Linear> model_;
  lockstep::DataLoader train_data_;
  std::unique_ptr<lockstep::Optimizer> optimizer_;
  int save_every_;
};

lockstep::DataLoader prepare_dataloader(const lockstep::TensorDataset& dataset,
                                        const lockstep::World& world, int64_t batch_size) {
  return lockstep::DataLoader(
      dataset,
      lockstep::DistributedSampler(
          {.dataset_size = dataset.size(), .rank = world.rank(), .world_size = world.size()}),
      {}, {.batch_size = batch_size, .pin_memory = world.device().is_cuda()});
}

/// What each process runs.
void run(const series::Args& args) {
  const auto world = lockstep::init();  // the series' ddp_setup
  at::manual_seed(0);
  const auto dataset = series::make_train_dataset(2048);
  torch::nn::Linear model(20, 1);
  model->to(world.device());
  auto optimizer = lockstep::make_optimizer("sgd", model->parameters(), {.lr = 1e-3});
  Trainer trainer(model, prepare_dataloader(dataset, world, args.batch_size), std::move(optimizer),
                  world, args.save_every);
  trainer.train(args.total_epochs);
  // The group is closed at the end of `world`: the series' destroy_process_group.
}

}  // namespace

int main(int argc, char** argv) try {
  const auto gpus = static_cast<int>(at::getNumGPUs());
  int world_size = gpus > 0 ? gpus : 2;
  const auto args = series::read_args(argc, argv, [&](examples::Flags& flags) {
    flags.option("--devices", world_size, "Processes to spawn, one a GPU", {1});
  });
  lockstep::SpawnOptions options;
  options.master_addr = lockstep::env_string("MASTER_ADDR").value_or("localhost");
  options.master_port =
      static_cast<int>(lockstep::env_int("MASTER_PORT", 1, 65535).value_or(12355));
  lockstep::spawn([&](int) { run(args); }, world_size, options);
  return 0;
} catch (...) {
  return examples::report_error();
}
