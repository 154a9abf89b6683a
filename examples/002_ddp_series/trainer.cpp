// The series' Trainer once more, now Lockstep's own: the program says what is trained, and two
// arguments say how. The same job by DDP, sharded, or in other numbers:
//   build/examples/002_ddp_series/trainer 50 10
//   build/examples/002_ddp_series/trainer 50 10 --devices 2
//   build/examples/002_ddp_series/trainer 50 10 --devices 2 --strategy fsdp --precision bf16-mixed
// Two hosts, IP being the address of the first, there:
//   HOSTS="--nnodes 2 --nproc-per-node 2 --master-addr IP --master-port 29500"
//   build/bin/lockstep run $HOSTS --node-rank 0 build/examples/002_ddp_series/trainer 50 10
// and the same on the second with --node-rank 1.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

#include "002_ddp_series/datautils.h"
#include "lockstep/lockstep.h"

namespace {

class Regression : public lockstep::TrainingModule<lockstep::Batch> {
 public:
  at::Tensor training_step(const lockstep::Batch& batch, int64_t) override {
    // Not the series' cross-entropy, which is always 0 over one output: see single_gpu.cpp.
    return torch::nn::functional::mse_loss(layer_->forward(batch.data), batch.target);
  }
  std::vector<lockstep::OptimizerConfig> configure_optimizers() override {
    return {{.make = lockstep::optimizer_factory("sgd", {.lr = 1e-3})}};
  }

 private:
  torch::nn::Linear layer_ = register_module("layer", torch::nn::Linear(20, 1));
};

/// The series' lines and checkpoints. On every rank: saving is a call of all of them.
class Snapshots : public lockstep::Callback {
 public:
  explicit Snapshots(int save_every) : save_every_(save_every) {}
  void on_epoch_end(lockstep::Trainer& trainer, const lockstep::EpochResult& result) override {
    const auto epoch = static_cast<long long>(result.epoch);
    std::printf("[GPU%d] Epoch %lld | Loss: %.4f\n", trainer.world().local_rank(), epoch,
                result.train.loss);
    std::fflush(stdout);
    if (epoch % save_every_ != 0) return;
    trainer.save_weights("checkpoint.safetensors");
    if (!trainer.is_first_rank()) return;
    std::printf("Epoch %lld | Training checkpoint saved at checkpoint.safetensors\n", epoch);
  }

 private:
  int save_every_;
};

void run(const series::Args& args, lockstep::TrainerOptions options) {
  const auto world = lockstep::init();
  at::manual_seed(0);
  const auto dataset = series::make_train_dataset(2048);
  const lockstep::DistributedSampler share({dataset.size(), world.rank(), world.size()});
  lockstep::DataLoader loader(dataset, share, {}, {.batch_size = args.batch_size});
  options.max_epochs = args.total_epochs;
  lockstep::Trainer trainer(world, options);
  trainer.add_callback(std::make_shared<Snapshots>(args.save_every));
  trainer.fit(std::make_shared<Regression>(), std::move(loader));
}

}  // namespace

int main(int argc, char** argv) try {
  lockstep::TrainerOptions options;
  int64_t devices = 1;
  const auto args = series::read_args(argc, argv, [&](examples::Flags& flags) {
    flags.option("--devices", devices, "Processes to start", {1});
    flags.choice("--strategy", options.strategy, lockstep::strategy_names(),
                 "How the model is spread over them");
    flags.choice("--precision", options.precision.precision, lockstep::precision_names(),
                 "Numbers to compute in");
  });
  if (devices > 1 && lockstep::spawn(static_cast<int>(devices))) return 0;
  run(args, options);
  return 0;
} catch (...) {
  return examples::report_error();
}
