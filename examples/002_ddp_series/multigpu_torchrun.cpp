// Part 3 of the series: the job is started by a launcher, `lockstep run` or torchrun, which sets
// the environment variables that init() reads, and it takes up where it was interrupted: rank 0
// saves a snapshot, and at the start every rank reads it if it is there.
//
// One host, two processes; the second line is for torchrun:
//   P=build/examples/002_ddp_series/multigpu_torchrun
//   build/bin/lockstep run --standalone --nproc-per-node 2 $P 50 10
//   torchrun --standalone --nproc-per-node 2 --no-python $P 50 10
// Two hosts with two processes each, the snapshot in a folder that both see; IP being the address
// of the first, there, with P as above:
//   HOSTS="--nnodes 2 --nproc-per-node 2 --master-addr IP --master-port 29500"
//   build/bin/lockstep run $HOSTS --node-rank 0 $P 50 10
// and the same on the second with --node-rank 1.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "002_ddp_series/datautils.h"
#include "lockstep/lockstep.h"

namespace {

class Trainer {
 public:
  /// Reads the snapshot before the model is wrapped: wrapping checks that all ranks have read
  /// alike.
  Trainer(torch::nn::Linear model, lockstep::DataLoader train_data,
          std::unique_ptr<lockstep::Optimizer> optimizer, const lockstep::World& world,
          int save_every, const std::string& snapshot_path)
      : rank_(world.rank()),
        gpu_id_(world.local_rank()),
        device_(world.device()),
        train_data_(std::move(train_data)),
        optimizer_(std::move(optimizer)),
        save_every_(save_every),
        snapshot_path_(snapshot_path) {
    if (std::filesystem::exists(snapshot_path_)) {
      std::printf("Loading snapshot\n");
      load_snapshot(*model);
    }
    model_ = std::make_unique<Ddp>(model, world.group());
  }

  void train(int max_epochs) {
    for (int epoch = epochs_run_; epoch < max_epochs; ++epoch) {
      run_epoch(epoch);
      // The series asks for local rank 0, which every host has; one file wants one writer.
      if (rank_ == 0 && epoch % save_every_ == 0) save_snapshot(epoch);
    }
  }

 private:
  using Ddp = lockstep::DistributedDataParallel<torch::nn::Linear>;

  void load_snapshot(torch::nn::Module& model) {
    const auto snapshot = lockstep::load_safetensors(snapshot_path_);
    const auto epochs = snapshot.metadata.find("EPOCHS_RUN");
    if (epochs == snapshot.metadata.end()) {
      throw lockstep::DataError(
          snapshot_path_ + " has no EPOCHS_RUN: it is no snapshot of this job",
          "move it away to start anew");
    }
    lockstep::load_state_dict(model, snapshot.tensors, snapshot_path_);
    epochs_run_ = std::stoi(epochs->second);
    std::printf("Resuming training from snapshot at Epoch %d\n", epochs_run_);
    std::fflush(stdout);
  }

  /// EPOCHS_RUN counts the epochs that are done, so that none is trained twice after a restart (the
  /// series stores the number of the last one, and repeats it). Plain SGD has no state to save. The
  /// file is written aside and renamed: a crash while saving leaves the previous snapshot whole.
  void save_snapshot(int epoch) {
    lockstep::save_safetensors(snapshot_path_, lockstep::state_dict(model_->module()),
                               {{"EPOCHS_RUN", std::to_string(epoch + 1)}});
    std::printf("Epoch %d | Training snapshot saved at %s\n", epoch, snapshot_path_.c_str());
    std::fflush(stdout);
  }

  void run_batch(const at::Tensor& source, const at::Tensor& targets) {
    lockstep::zero_grad(model_->module().parameters());
    const auto output = model_->forward(source);
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
    for (const auto& batch : train_data_.epoch(epoch)) {
      run_batch(batch.data.to(device_), batch.target.to(device_));
    }
  }

  int rank_;
  int gpu_id_;
  at::Device device_;
  lockstep::DataLoader train_data_;
  std::unique_ptr<lockstep::Optimizer> optimizer_;
  int save_every_;
  std::string snapshot_path_;
  int epochs_run_ = 0;
  std::unique_ptr<Ddp> model_;
};

lockstep::DataLoader prepare_dataloader(const lockstep::TensorDataset& dataset,
                                        const lockstep::World& world, int64_t batch_size) {
  return lockstep::DataLoader(
      dataset,
      lockstep::DistributedSampler(
          {.dataset_size = dataset.size(), .rank = world.rank(), .world_size = world.size()}),
      {}, {.batch_size = batch_size, .pin_memory = world.device().is_cuda()});
}

void run(const series::Args& args, const std::string& snapshot_path) {
  // The launcher's RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without a launcher, a
  // group of one.
  const auto world = lockstep::init();
  at::manual_seed(0);
  const auto dataset = series::make_train_dataset(2048);
  torch::nn::Linear model(20, 1);
  model->to(world.device());
  auto optimizer = lockstep::make_optimizer("sgd", model->parameters(), {.lr = 1e-3});
  Trainer trainer(model, prepare_dataloader(dataset, world, args.batch_size), std::move(optimizer),
                  world, args.save_every, snapshot_path);
  trainer.train(args.total_epochs);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string snapshot_path = "snapshot.safetensors";
  const auto args = series::read_args(argc, argv, [&](examples::Flags& flags) {
    flags.option("--snapshot-path", snapshot_path,
                 "Where the snapshot is kept; --snapshot_path too", "FILE");
  });
  run(args, snapshot_path);
  return 0;
} catch (...) {
  return examples::report_error();
}
