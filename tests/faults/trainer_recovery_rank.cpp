// Ranks of a Trainer that live on when others die (test_train_recovery.py):
//   lockstep_trainer_recovery_rank FOLDER RANKS RESTARTS EPOCHS
// trains on 1,000 numbered samples, and writes into FOLDER, for each process:
//   begun-PID     a line for each batch: generation, step, epoch, and the samples of this rank
//   finished-PID  a line for each finished step: generation, step
//   end-PID       the weights, once it is done
#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/data/loader.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_module.h"

namespace {

using namespace lockstep;

constexpr int64_t kSamples = 1000;
constexpr int64_t kBatch = 7;

class Numbers : public TrainingModule<Batch> {
 public:
  Numbers(std::ofstream& begun, int64_t generation) : begun_(begun), generation_(generation) {}

  at::Tensor training_step(const Batch& batch, int64_t) override {
    begun_ << generation_ << " " << global_step() + 1 << " " << current_epoch();
    for (int64_t i = 0; i < batch.size() - batch.padding; ++i)
      begun_ << " " << batch.data[i][0].item<int64_t>();
    begun_ << std::endl;
    const at::Tensor x = batch.data.to(at::kFloat).div(static_cast<double>(kSamples));
    return at::mse_loss(layer_->forward(norm_->forward(x)), x.mul(2).expand({-1, 3}));
  }
  void validation_step(const Batch& batch, int64_t) override {
    log("mean", layer_->forward(norm_->forward(batch.data.to(at::kFloat))).mean(), batch.size());
  }
  std::vector<OptimizerConfig> configure_optimizers() override {
    return {{.make = optimizer_factory("adam", {.lr = 1e-3})}};
  }

 private:
  std::ofstream& begun_;
  int64_t generation_;
  torch::nn::BatchNorm1d norm_ = register_module("norm", torch::nn::BatchNorm1d(1));
  torch::nn::Linear layer_ = register_module("layer", torch::nn::Linear(1, 3));
};

class Finished : public Callback {
 public:
  Finished(std::ofstream& file, int64_t generation) : file_(file), generation_(generation) {}
  void on_step(Trainer&, const StepResult& result) override {
    file_ << generation_ << " " << result.step << std::endl;
  }

 private:
  std::ofstream& file_;
  int64_t generation_;
};

DataLoader loader_of(const World& world, bool shuffle) {
  TensorDataset numbers{.name = "numbers",
                        .data = at::arange(kSamples, at::kFloat).reshape({kSamples, 1}),
                        .targets = at::zeros({kSamples, 1})};
  const DistributedSampler sampler({.dataset_size = kSamples,
                                    .rank = world.rank(),
                                    .world_size = world.size(),
                                    .shuffle = shuffle});
  return DataLoader(std::move(numbers), sampler, {}, {.batch_size = kBatch});
}

}  // namespace

int main(int, char** argv) {
  const std::string folder = argv[1];
  StartOptions options;
  options.max_restarts = std::atoi(argv[3]);
  ElasticJob job(std::atoi(argv[2]), options);
  const std::string process = std::to_string(getpid());
  std::ofstream begun(folder + "/begun-" + process), finished(folder + "/finished-" + process);
  std::ofstream end;
  job.run([&](World& world) {
    at::manual_seed(1);
    auto module = std::make_shared<Numbers>(begun, job.generation());
    TrainerOptions trainer_options;
    trainer_options.max_epochs = std::atoi(argv[4]);
    trainer_options.log_every_n_steps = 3;
    Trainer trainer(world, trainer_options);
    trainer.add_callback(std::make_shared<Finished>(finished, job.generation()));
    trainer.live_on(job);
    trainer.fit(module, loader_of(world, true), loader_of(world, false));
    end = std::ofstream(folder + "/end-" + process);
    end.precision(17);
    for (const auto& parameter : module->parameters()) {
      for (int64_t i = 0; i < parameter.numel(); ++i)
        end << parameter.view(-1)[i].item<double>() << " ";
    }
    end << std::endl;
  });
}
