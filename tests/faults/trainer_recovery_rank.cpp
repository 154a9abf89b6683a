// Ranks of a Trainer that live on when others die (test_train_recovery.py,
// test_recovery_phases.py):
//   lockstep_trainer_recovery_rank FOLDER RANKS RESTARTS EPOCHS [STRATEGY [FAULT...]]
// trains on 1,000 numbered samples, and writes into FOLDER, for each process:
//   begun-PID     a line for each batch: generation, step, epoch, and the samples of this rank
//   finished-PID  a line for each finished step: generation, step
//   end-PID       the weights, once it is done
// With a strategy all ranks wait for new ones. A fault is PHASE:KIND:STEP:RANK, and happens once.
// Where the phase is one of recovering, the step is a generation.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <signal.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/data/loader.h"
#include "lockstep/launch/start_ranks.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_module.h"

namespace {

using namespace lockstep;

constexpr int64_t kSamples = 1000;
constexpr int64_t kBatch = 7;
constexpr int64_t kSaveEvery = 5;

/// What this process is to suffer, and when.
class Faults {
 public:
  Faults(std::string folder, std::vector<std::string> plan)
      : folder_(std::move(folder)), plan_(std::move(plan)) {}

  /// Where `now` is the step, or the generation, of a fault in this phase.
  void pass(const std::string& phase, int64_t now, int rank) const {
    for (const auto& fault : plan_) {
      const auto words = split(fault, ':');
      const bool is_rank = words[3] == "any" || words[3] == std::to_string(rank);
      if (words[0] != phase || words[2] != std::to_string(now) || !is_rank) continue;
      // Once, whoever makes the step again.
      const std::string mark = folder_ + "/fault-" + fault;
      if (::close(::open(mark.c_str(), O_CREAT | O_EXCL, 0600)) == 0) suffer(words[1]);
    }
  }

 private:
  static void suffer(const std::string& kind) {
    if (kind == "kill") raise(SIGKILL);
    if (kind == "exit") _exit(3);
    if (kind == "stop") raise(SIGSTOP);
    throw std::runtime_error("a rank's own failure");
  }

  std::string folder_;
  std::vector<std::string> plan_;
};

/// Where the job is, for the parts of it that suffer faults.
struct Place {
  const Faults& faults;
  int64_t step = 1;  ///< The one that is being made.
  int rank = 0;
  void pass(const std::string& phase) const { faults.pass(phase, step, rank); }
};

/// Suffers faults before and after its step.
class Suffering : public Optimizer {
 public:
  Suffering(std::unique_ptr<Optimizer> own, const Place& place)
      : own_(std::move(own)), place_(place) {}
  void step() override {
    place_.pass("before-step");
    own_->step();
    place_.pass("in-step");
  }
  void step_scaled(const StepScale& scale) override {
    place_.pass("before-step");
    own_->step_scaled(scale);
    place_.pass("in-step");
  }
  void set_lr(double lr) override { own_->set_lr(lr); }
  double lr() const override { return own_->lr(); }
  const std::vector<at::Tensor>& parameters() const override { return own_->parameters(); }
  StateDict state() const override { return own_->state(); }
  void load_state(const StateDict& state) override { own_->load_state(state); }
  const std::string& name() const override { return own_->name(); }
  bool is_elementwise() const override { return own_->is_elementwise(); }

 private:
  std::unique_ptr<Optimizer> own_;
  const Place& place_;
};

class Numbers : public TrainingModule<Batch> {
 public:
  Numbers(std::ofstream& begun, int64_t generation, Place& place)
      : begun_(begun), generation_(generation), place_(place) {}

  at::Tensor training_step(const Batch& batch, int64_t) override {
    place_.step = global_step() + 1;
    place_.pass("forward");
    begun_ << generation_ << " " << global_step() + 1 << " " << current_epoch();
    for (int64_t i = 0; i < batch.size() - batch.padding; ++i)
      begun_ << " " << batch.data[i][0].item<int64_t>();
    begun_ << std::endl;
    const at::Tensor x = batch.data.to(at::kFloat).div(static_cast<double>(kSamples));
    at::Tensor hidden = hidden_->forward(norm_->forward(x));
    // The layer behind it has its gradient, and may be on its way to the others.
    if (hidden.requires_grad())
      hidden.register_hook([this](const at::Tensor&) { place_.pass("bucket"); });
    return at::mse_loss(layer_->forward(hidden), x.mul(2).expand({-1, 3}));
  }
  void validation_step(const Batch& batch, int64_t) override {
    place_.pass("evaluation");
    log("mean", layer_->forward(hidden_->forward(norm_->forward(batch.data.to(at::kFloat)))).mean(),
        batch.size());
  }
  std::vector<OptimizerConfig> configure_optimizers() override {
    return {{.make = [this](std::vector<at::Tensor> parameters) {
      return std::make_unique<Suffering>(
          make_optimizer("adam", std::move(parameters), {.lr = 1e-3}), place_);
    }}};
  }

 private:
  std::ofstream& begun_;
  int64_t generation_;
  Place& place_;
  torch::nn::BatchNorm1d norm_ = register_module("norm", torch::nn::BatchNorm1d(1));
  torch::nn::Linear hidden_ = register_module("hidden", torch::nn::Linear(1, 8));
  torch::nn::Linear layer_ = register_module("layer", torch::nn::Linear(8, 3));
};

/// Saves, where ranks have parts of the state.
class Finished : public Callback {
 public:
  Finished(std::ofstream& file, int64_t generation, const Place& place,
           std::optional<CheckpointFolder> folder)
      : file_(file), generation_(generation), place_(place), folder_(std::move(folder)) {}
  void on_step(Trainer& trainer, const StepResult& result) override {
    file_ << generation_ << " " << result.step << std::endl;
    place_.pass("finished");
    if (folder_ && result.step % kSaveEvery == 0) trainer.save_snapshot(*folder_);
    place_.pass("save");
  }

 private:
  std::ofstream& file_;
  int64_t generation_;
  const Place& place_;
  std::optional<CheckpointFolder> folder_;
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

int main(int argc, char** argv) {
  const std::string folder = argv[1];
  StartOptions options;
  options.max_restarts = std::atoi(argv[3]);
  const int ranks = std::atoi(argv[2]);
  launch::start_ranks(ranks, options, "ElasticJob", true);
  ElasticJob job(options.init, argc > 5 ? std::set<int>{ranks} : std::set<int>());
  const std::string process = std::to_string(getpid());
  std::ofstream begun(folder + "/begun-" + process), finished(folder + "/finished-" + process);
  std::ofstream end;
  const Faults faults(folder, {argv + std::min(argc, 6), argv + argc});
  Place place{.faults = faults};
  // Whoever is ahead of the others gives it to them.
  job.add("number", {.get =
                         [&] {
                           faults.pass("giving", job.generation(), place.rank);
                           return StateDict{{"one", at::ones({1})}};
                         },
                     .set = [](const StateDict&) {}});
  job.run([&](World& world) {
    place.rank = world.rank();
    faults.pass("recovering", job.generation(), world.rank());
    at::manual_seed(1);
    auto module = std::make_shared<Numbers>(begun, job.generation(), place);
    TrainerOptions trainer_options;
    trainer_options.max_epochs = std::atoi(argv[4]);
    trainer_options.log_every_n_steps = 3;
    std::optional<CheckpointFolder> saved;
    if (argc > 5) trainer_options.strategy = argv[5];
    if (trainer_options.strategy != "ddp") saved.emplace(folder + "/saved", 1);
    Trainer trainer(world, trainer_options);
    trainer.add_callback(std::make_shared<Finished>(finished, job.generation(), place, saved));
    if (!trainer.live_on(job) && saved && job.generation() > 0) {
      auto found = load_checkpoint(world.group(), "auto", &*saved, {}, world.device());
      if (found) trainer.restore(std::move(*found));
    }
    // As others begin to meet again, or while they do.
    const std::shared_ptr<void> left(nullptr, [&](void*) {
      if (std::uncaught_exceptions() > 0) faults.pass("meeting", job.generation(), world.rank());
    });
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
