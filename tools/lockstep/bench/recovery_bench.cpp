// `lockstep bench recovery`: an MLP on MNIST whose ranks are killed at random moments, ours and
// torchrun's. Its processes say what they do in files.
#include <unistd.h>

#include <fstream>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/hash.h"
#include "lockstep/base/words.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/data/loader.h"
#include "lockstep/launch/spawn_ranks.h"
#include "lockstep/optim/optim.h"
#include "lockstep/recovery/elastic_job.h"
#include "lockstep/tool/cli.h"
#include "lockstep/train/model_training.h"
#include "lockstep/train/trainer.h"
#include "tools/lockstep/bench/step_bench.h"
#include "tools/lockstep/mnist_folder.h"

namespace lockstep::tool {
namespace {

/// Attempts are further apart than generations within one.
constexpr int64_t kGenerationsOfAttempt = 1'000'000;

/// Writes what one process does into the folder's files, as bench/recovery.py does. Saves, where
/// all start again.
class RecoveryNotes : public Callback {
 public:
  RecoveryNotes(const PlainJson& config, int64_t generation, const torch::nn::Module& module)
      : folder_(config.at("folder").get<std::string>()),
        generation_(generation),
        module_(module),
        every_(config.at("save_every")),
        steps_(folder_ + "/steps-" + std::to_string(getpid()), std::ios::app) {
    if (config.at("side") == "restart") saved.emplace(folder_ + "/saved", 1);
  }
  std::optional<CheckpointFolder> saved;

  /// Step -1: a failure was noticed.
  void note(int64_t step, int64_t samples) {
    steps_ << generation_ << ' ' << step << ' ' << samples << ' '
           << BenchClock::now().time_since_epoch().count() << std::endl;
  }
  void on_step(Trainer& trainer, const StepResult& result) override {
    note(result.step, result.samples);
    if (saved && result.step % every_ == 0) trainer.save_snapshot(*saved);
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
  const std::string folder_;
  const int64_t generation_;
  const torch::nn::Module& module_;
  const int64_t every_;
  std::ofstream steps_;
};

/// `job` is null where all start again.
void train_generation(const PlainJson& config, const TensorDataset& data, const World& world,
                      ElasticJob* job) {
  const int64_t generation =
      read_job_environment().restart_count * kGenerationsOfAttempt + (job ? job->generation() : 0);
  const auto module = std::make_shared<ModelTraining>(
      seeded_model("mlp"),
      ModelTrainingOptions{
          .optimizer = {.make = optimizer_factory("sgd", {.lr = 0.01, .momentum = 0.9})}});
  const DistributedSampler sampler(
      {.dataset_size = data.size(), .rank = world.rank(), .world_size = world.size()});
  DataLoader loader(data, sampler, {normalize(), flatten()}, {.batch_size = 64});
  Trainer trainer(world, {.max_epochs = config.at("epochs").get<int64_t>(),
                          .log_every_n_steps = 1'000'000'000});
  const auto notes = std::make_shared<RecoveryNotes>(config, generation, *module);
  trainer.add_callback(notes);
  if (job) trainer.live_on(*job);
  if (notes->saved) {
    auto found = load_checkpoint(world.group(), "auto", &*notes->saved, {}, world.device());
    if (found) trainer.restore(std::move(*found));
  }
  try {
    trainer.fit(module, std::move(loader));
  } catch (const CommError&) {
    notes->note(-1, 0);
    throw;
  }
}

void train_rank(const PlainJson& config, const TensorDataset& data) {
  if (config.at("side") == "restart") return train_generation(config, data, init(), nullptr);
  std::set<int> sizes;
  if (config.at("replacement")) sizes.insert(config.at("ranks").get<int>());
  ElasticJob job(InitOptions(), sizes);
  job.run([&](World& world) { train_generation(config, data, world, &job); });
}

constexpr int64_t kSaveEvery = 100;          ///< Steps; where all ranks start again.
constexpr int64_t kKillsOfJob = 10;          ///< Sides take turns after so many.
constexpr int64_t kEndless = 1'000'000'000;  ///< Epochs.
constexpr int64_t kMostRestarts = 1'000'000;

/// A row, and what its kills have come to so far.
struct RecoveryRow {
  std::string side;
  int64_t ranks;
  bool replacement;
  Figures recovery = {}, detection = {};
  int64_t samples_lost = 0, samples_repeated = 0;
  std::map<std::string, std::set<std::string>> weights = {};  ///< Hashes, by epoch.

  int64_t kills() const { return static_cast<int64_t>(recovery.size()); }
};

/// What recovery_kills.py does with a job.
struct JobPlan {
  int64_t kills = 0;
  int64_t epochs = kEndless;  ///< Else the job ends by itself.
  int goodput_kills = 0;
};

/// One job: what recovery_kills.py writes.
BenchRow run_job(BenchRunner& runner, const RecoveryRow& row, const std::string& data,
                 const JobPlan& plan) {
  const TemporaryDirectory folder("lockstep-recovery");
  const BenchRow job = {{"kind", "recovery"},
                        {"side", row.side},
                        {"ranks", row.ranks},
                        {"replacement", row.replacement},
                        {"data", data},
                        {"folder", folder.path().string()},
                        {"epochs", plan.epochs},
                        {"save_every", kSaveEvery},
                        {"restarts", row.replacement ? kMostRestarts : 0}};
  auto command = worker_command(job);
  if (row.side == "torchrun") {
    const auto script = runner.python_command("recovery.py", job);
    command = runner.torchrun(row.ranks,
                              {"--standalone", "--max-restarts", std::to_string(kMostRestarts)});
    command.insert(command.end(), script.begin(), script.end());
  }
  // The weights after the next whole epoch tell whether kills have changed anything.
  const bool tells = row.replacement && plan.kills > 0;
  const BenchRow config = {
      {"command", command},
      {"folder", folder.path().string()},
      {"kills", plan.kills},
      {"ends", plan.epochs != kEndless},
      {"goodput_kills", plan.goodput_kills},
      {"kill_every", runner.options.kill_every},
      {"seed", runner.options.seed + static_cast<uint64_t>(row.kills())},
      {"steps_after", tells ? 2 * BenchData::kTrainSamples / 64 / row.ranks : 0}};
  return runner.run_python("recovery, " + row.side, "recovery_kills.py", config).second;
}

void run_kills(BenchRunner& runner, const std::string& data, RecoveryRow& row) {
  int64_t kills = std::min(kKillsOfJob, runner.options.kills - row.kills());
  if (!row.replacement) kills = std::min(kills, row.ranks - 1);
  bench_progress(row.side + ", " + counted(row.ranks, "rank") +
                 (row.replacement ? "" : ", without replacement") + ": kills " +
                 std::to_string(row.kills() + 1) + " to " + std::to_string(row.kills() + kills));
  const BenchRow result = run_job(runner, row, data, {.kills = kills});
  for (const double seconds : result.at("recovery")) row.recovery.push_back(seconds);
  for (const double seconds : result.at("detection")) row.detection.push_back(seconds);
  row.samples_lost += result.at("samples_lost").get<int64_t>();
  row.samples_repeated += result.at("samples_repeated").get<int64_t>();
  for (const auto& [epoch, hashes] : result.at("weights").items())
    row.weights[epoch].insert(hashes.begin(), hashes.end());
}

/// Whether they are those of a run that nobody disturbs.
BenchRow has_same_weights(BenchRunner& runner, const std::string& data, const RecoveryRow& row) {
  if (!row.replacement || row.weights.empty()) return nullptr;
  int64_t epochs = 0;
  for (const auto& [epoch, hashes] : row.weights)
    epochs = std::max<int64_t>(epochs, std::stoll(epoch) + 1);
  const BenchRow expected = run_job(runner, row, data, {.epochs = epochs}).at("weights");
  return std::all_of(row.weights.begin(), row.weights.end(), [&](const auto& epoch) {
    return expected.at(epoch.first) == BenchRow(epoch.second);
  });
}

/// The part of the time that is left where a rank is killed every `kill_every` seconds.
BenchRow goodput_of(BenchRunner& runner, const std::string& data, const RecoveryRow& row) {
  if (!row.replacement) return nullptr;
  bench_progress(row.side + ", " + counted(row.ranks, "rank") + ": goodput");
  return run_job(runner, row, data, {.goodput_kills = 2 * runner.options.rounds_or_default()})
      .at("goodput");
}

}  // namespace

PlainJson recovery_worker(const PlainJson& config) {
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

BenchRows bench_recovery(BenchRunner& runner) {
  const BenchOptions& options = runner.options;
  const BenchData data(options.data_dir);
  std::vector<RecoveryRow> wanted;
  for (const int64_t ranks : options.devices) {
    if (ranks < 2) throw UsageError("bench recovery: nobody survives of --devices 1");
    for (const bool replacement : {true, false}) wanted.push_back({"ours", ranks, replacement});
    for (const char* side : {"restart", "torchrun"}) wanted.push_back({side, ranks, true});
  }
  for (bool more = true; std::exchange(more, false);) {
    for (RecoveryRow& row : wanted) {
      if (row.kills() >= options.kills) continue;
      run_kills(runner, data.folder(), row);
      more = true;
    }
  }
  BenchRows rows;
  for (const RecoveryRow& row : wanted) {
    rows.push_back({{"side", row.side},
                    {"devices", row.ranks},
                    {"replacement", row.replacement},
                    {"recovery_p50_s", median(row.recovery)},
                    {"recovery_p99_s", percentile(row.recovery, 0.99)},
                    {"detection_p50_s", nullptr},
                    {"samples_lost", row.samples_lost},
                    {"samples_repeated", row.samples_repeated},
                    {"goodput", goodput_of(runner, data.folder(), row)},
                    {"sha256_equal", has_same_weights(runner, data.folder(), row)},
                    {"kills", row.kills()},
                    {"dataset", data.name()},
                    {"seed", options.seed}});
    if (!row.detection.empty()) rows.back()["detection_p50_s"] = median(row.detection);
  }
  return rows;
}

}  // namespace lockstep::tool
