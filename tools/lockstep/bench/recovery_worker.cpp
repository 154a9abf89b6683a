// The jobs of `lockstep bench recovery`: an MLP on MNIST, whose ranks say what they do in files.
#include <ATen/Functions.h>
#include <unistd.h>

#include <fstream>

#include "lockstep/base/hash.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/data/loader.h"
#include "lockstep/launch/spawn_ranks.h"
#include "lockstep/models/models.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/tool/cli.h"
#include "lockstep/train/trainer.h"
#include "lockstep/train/training_module.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

/// Attempts are further apart than generations within one.
constexpr int64_t kGenerationsOfAttempt = 1'000'000;

/// What one process writes: whole numbers of 64 bits. See bench/recovery.py, which writes the same.
class RecoveryLog {
 public:
  explicit RecoveryLog(const std::string& folder) {
    const std::string process = std::to_string(getpid());
    begun_.open(folder + "/begun-" + process, std::ios::binary | std::ios::app);
    finished_.open(folder + "/finished-" + process, std::ios::binary | std::ios::app);
  }
  void set_generation(int64_t generation) { generation_ = generation; }

  void begin(int64_t step, int64_t epoch, const at::Tensor& samples) {
    const int64_t head[] = {generation_, step, epoch, samples.numel()};
    write(begun_, head, sizeof head);
    write(begun_, samples.contiguous().const_data_ptr(), samples.nbytes());
    begun_.flush();
  }
  /// Step -1: a failure was noticed.
  void finish(int64_t step) {
    const int64_t row[] = {generation_, step, BenchClock::now().time_since_epoch().count()};
    write(finished_, row, sizeof row);
    finished_.flush();
  }

 private:
  static void write(std::ofstream& file, const void* bytes, size_t size) {
    file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  }

  std::ofstream begun_;
  std::ofstream finished_;
  int64_t generation_ = 0;
};

/// Batches have the samples' numbers in place of their labels.
class NumberedMlp : public TrainingModule<Batch> {
 public:
  NumberedMlp(at::Tensor labels, RecoveryLog& log) : labels_(std::move(labels)), log_(log) {
    model_ = register_module("model", make_model("mlp"));
  }
  at::Tensor training_step(const Batch& batch, int64_t) override {
    log_.begin(global_step() + 1, current_epoch(),
               batch.target.narrow(0, 0, batch.size() - batch.padding));
    return at::cross_entropy_loss(model_->forward(batch.data),
                                  labels_.index_select(0, batch.target));
  }
  void validation_step(const Batch&, int64_t) override {}
  std::vector<OptimizerConfig> configure_optimizers() override {
    return {{.make = optimizer_factory("sgd", {.lr = 0.01, .momentum = 0.9})}};
  }

 private:
  at::Tensor labels_;
  RecoveryLog& log_;
  std::shared_ptr<Model> model_;
};

/// Notes each step, and the weights after each epoch; saves, where all start again.
class RecoveryNotes : public Callback {
 public:
  RecoveryNotes(RecoveryLog& log, const PlainJson& config, const torch::nn::Module& module)
      : log_(log), folder_(config.at("folder")), module_(module) {
    if (config.at("side") == "restart") saved_.emplace(folder_ + "/saved", 1);
    every_ = config.at("save_every");
  }
  std::optional<CheckpointFolder>& saved() { return saved_; }

  void on_step(Trainer& trainer, const StepResult& result) override {
    log_.finish(result.step);
    if (saved_ && result.step % every_ == 0) trainer.save_snapshot(*saved_);
  }
  void on_epoch_end(Trainer& trainer, const EpochResult& result) override {
    if (!trainer.is_first_rank()) return;
    std::string bytes;
    for (const at::Tensor& parameter : module_.parameters())
      bytes.append(static_cast<const char*>(parameter.const_data_ptr()), parameter.nbytes());
    std::ofstream(folder_ + "/weights", std::ios::app)
        << std::to_string(result.epoch) + " " + sha256_hex(bytes) + "\n";
  }

 private:
  RecoveryLog& log_;
  std::string folder_;
  const torch::nn::Module& module_;
  std::optional<CheckpointFolder> saved_;
  int64_t every_ = 0;
};

/// `job` is null where all start again.
void train_generation(const PlainJson& config, const TensorDataset& data, const World& world,
                      RecoveryLog& log, ElasticJob* job) {
  const int64_t attempt = read_job_environment().restart_count;
  log.set_generation(attempt * kGenerationsOfAttempt + (job ? job->generation() : 0));
  at::manual_seed(0);
  const auto module = std::make_shared<NumberedMlp>(data.targets, log);
  TensorDataset numbered = data;
  numbered.targets = at::arange(data.size());
  const DistributedSampler sampler(
      {.dataset_size = data.size(), .rank = world.rank(), .world_size = world.size()});
  DataLoader loader(std::move(numbered), sampler, {normalize(), flatten()}, {.batch_size = 64});
  Trainer trainer(world, {.max_epochs = config.at("epochs").get<int64_t>(),
                          .log_every_n_steps = 1'000'000'000});
  const auto notes = std::make_shared<RecoveryNotes>(log, config, *module);
  trainer.add_callback(notes);
  if (job) trainer.live_on(*job);
  if (notes->saved()) {
    auto found = load_checkpoint(world.group(), "auto", &*notes->saved(), {}, world.device());
    if (found) trainer.restore(std::move(*found));
  }
  try {
    trainer.fit(module, std::move(loader));
  } catch (const CommError&) {
    log.finish(-1);
    throw;
  }
}

void train_rank(const PlainJson& config, const TensorDataset& data) {
  RecoveryLog log(config.at("folder"));
  if (config.at("side") == "restart") return train_generation(config, data, init(), log, nullptr);
  std::set<int> sizes;
  if (config.at("replacement")) sizes.insert(config.at("ranks").get<int>());
  ElasticJob job(InitOptions(), sizes);
  job.run([&](World& world) { train_generation(config, data, world, log, &job); });
}

}  // namespace

PlainJson recovery_worker(const PlainJson& config) {
  std::ofstream(config.at("folder").get<std::string>() + "/launcher") << getpid() << std::endl;
  // Once for all ranks, which are forks.
  const TensorDataset data =
      load_dataset("mnist", {.data_dir = config.at("data").get<std::string>()}).train;
  launch::SpawnCall call;
  call.name = "lockstep bench recovery";
  call.recovers = config.at("side") == "ours";
  SpawnOptions options;
  options.max_restarts = config.at("restarts");
  const auto become_rank = [&] {
    const auto role = launch::spawn_ranks(config.at("ranks").get<int>(), options, call);
    if (role == launch::SpawnRole::worker) train_rank(config, data);
    return 0;
  };
  call.body = [&] { return run_guarded(call.name, become_rank); };
  become_rank();
  return {};
}

}  // namespace lockstep::tool
