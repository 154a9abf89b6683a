// `lockstep bench targets`: the figures that the project promises, with what was measured.
#include <cmath>
#include <cstdio>

#include "lockstep/amp/half_support.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

/// A promise about speed: a figure that is to stay at or below (or at or above) a bound.
struct Target {
  std::string name;
  double bound;
  bool at_most = true;
};

/// Of a step's time, of Python's time over Gloo.
struct StepTarget {
  const char* name;
  double bound;
  const char* model;
  int64_t ranks;
  const char* backend;
  const char* strategy = "ddp";
  const char* optimizer = "sgd";
  int64_t batch_size = 0;
};
constexpr StepTarget kSteps[] = {
    {"MLP step, 1 rank: of Python's time", 0.70, "mlp", 1, "gloo"},
    {"linear step, 1 rank: of Python's time", 0.20, "linear", 1, "gloo"},
    {"MLP step, 2 ranks over Gloo: of Python's time", 1.00, "mlp", 2, "gloo"},
    {"linear step, 2 ranks over Gloo: of Python's time", 1.00, "linear", 2, "gloo"},
    {"linear step, 2 ranks over shared memory: of Python's time", 1.0 / 30, "linear", 2, "shm"},
    {"MLP step, 2 ranks over shared memory: of Python's time", 1.0 / 7, "mlp", 2, "shm"},
    {"ConvNet step, batch 100, 2 ranks: of Python's time", 0.6, "convnet", 2, "shm", "ddp", "sgd",
     100},
    {"step of 6 x Linear(784, 784), 2 ranks: of Python's time", 0.7, "wide", 2, "shm"}};

/// Strategies over shared memory, with two ranks and Adam, against Python's over Gloo.
struct StrategyTarget {
  const char* strategy;
  const char* model;
  double bound;
};
constexpr StrategyTarget kStrategies[] = {
    {"zero1", "mlp", 0.15},   {"zero1", "wide", 0.5},   {"fsdp", "mlp", 0.1},
    {"fsdp", "wide", 0.25},   {"pipeline", "mlp", 0.2}, {"pipeline", "wide", 0.6},
    {"ddp", "gpt", 0.9},      {"zero1", "gpt", 0.9},    {"fsdp", "gpt", 0.85},
    {"pipeline", "gpt", 0.9},
};
const Target kFsdpOwn = {"gpt step with fsdp, 2 ranks: of our own with ddp", 1.1};
const Target kTwoOwn = {"MLP step, 2 ranks over shared memory: of its own with 1 rank", 1.2};
const Target kHalf = {"ConvNet step in bf16-mixed, batch 100, 1 rank: of 32-true", 0.65};

const Target kTrain = {
    "lockstep train, MLP, 3 epochs, 2 ranks over Gloo, whole process: of Python's time", 0.50};
const Target kAccuracy = {"its accuracy: points away from Python's", 0.3};
const Target kMemory = {"its peak memory of a rank: of Python's", 0.70};
const Target kSharedTrain = {
    "lockstep train, MLP, 3 epochs, 2 ranks, whole process: of Python's time", 0.1};
const Target kLoader = {"loader with normalisation on one core: samples/s", 1'000'000, false};
const Target kLaunch = {"lockstep run, 2 ranks to the first all-reduce and out: of torchrun's time",
                        0.20};

/// All-reduces over shared memory, of Gloo's time.
struct SizeTarget {
  int64_t bytes;
  const char* size;
  double bound;
};
constexpr SizeTarget kAllReduce[] = {{0, "", 1.0 / 100},           {4, "4 B", 1.0 / 100},
                                     {1024, "1 KB", 1.0 / 100},    {16384, "16 KB", 1.0 / 35},
                                     {65536, "64 KB", 1.0 / 35},   {437544, "437 KB", 1.0 / 12},
                                     {1 << 20, "1 MB", 1.0 / 8},   {4 << 20, "4 MB", 1.0 / 5},
                                     {16 << 20, "16 MB", 1.0 / 5}, {64 << 20, "64 MB", 1.0 / 5}};
/// The same with 4 and 8 ranks.
constexpr SizeTarget kManyRanks[] = {{437544, "437 KB", 1.0 / 5}};
/// From this size on so much of what copying alone allows; see allreduce_worker.
constexpr int64_t kLarge = 4 << 20;
constexpr double kOfBound = 0.8;

/// Python over the backend "lockstep", in the order of bench_python.
const Target kPython[] = {
    {"Python's DDP step of linear, 2 ranks over lockstep: of Gloo's time", 0.12},
    {"Python's DDP step of the MLP, 2 ranks over lockstep: of Gloo's time", 0.2},
    {"Python's DDP step of 6 x Linear(784, 784), 2 ranks over lockstep: of Gloo's time", 0.65},
    {"Python's all-reduce of 4 B, 2 ranks over lockstep: of Gloo's time", 0.05},
    {"Python's all-reduce of 437 KB, 2 ranks over lockstep: of Gloo's time", 0.1},
    {"lockstep run, 2 Python ranks to the first all-reduce and out: of torchrun's time", 0.6}};

std::string number(double value) {
  return formatted(value >= 1000 ? "%.0f" : value < 0.1 ? "%.4f" : "%.2f", value);
}

BenchRows run(BenchRows (*bench)(BenchRunner&), const BenchOptions& options) {
  BenchRunner runner(options);
  return bench(runner);
}

/// Measures target after target.
class Targets {
 public:
  explicit Targets(const BenchOptions& given) : options_(given) {
    options_.backends = {"gloo"};
    if (!options_.json) std::printf("%-74s %-18s %9s\n", "figure", "target", "measured");
  }

  BenchRows measure() && {
    for (const StepTarget& target : kSteps) step(target);
    for (const char* backend : {"gloo", "shm"}) training(backend);
    all_reduce(2, kAllReduce);
    for (const int64_t ranks : {4, 8}) all_reduce(ranks, kManyRanks);
    strategies();
    own_ratios();
    const auto loader = run(bench_loader, options_).front();
    add(kLoader, loader["samples_per_s"], loader);
    const auto launch = run(bench_launch, options_).front();
    add(kLaunch, launch["ratio"], launch);
    python();
    return std::move(rows_);
  }

 private:
  void add(const Target& target, double measured, const BenchRow& details) {
    const bool met = target.at_most ? measured <= target.bound : measured >= target.bound;
    rows_.push_back({{"target", target.name},
                     {"bound", target.bound},
                     {"at_most", target.at_most},
                     {"measured", measured},
                     {"met", met},
                     {"details", details}});
    if (options_.json) return;
    const std::string bound = (target.at_most ? "at most " : "at least ") + number(target.bound);
    std::printf("%-74s %-18s %9s  %s\n", target.name.c_str(), bound.c_str(),
                number(measured).c_str(), met ? "met" : "NOT MET");
    std::fflush(stdout);
  }

  /// Time over `backend` and Python's.
  BenchRow step(const StepTarget& target) {
    BenchOptions options = options_;
    options.models = {target.model};
    options.devices = {target.ranks};
    options.backends = {target.backend};
    options.strategies = {target.strategy};
    options.optimizer = target.optimizer;
    options.batch_size = target.batch_size;
    if (target.model == std::string("gpt")) {  // A step of Python's takes almost a second.
      options.steps = std::min<int64_t>(options.steps, 10);
      options.rounds = std::min(options.rounds_or_default(), 3);
    }
    const BenchRow row = run(bench_step, options).front();
    add({target.name, target.bound}, row["ratio"], row);
    return row;
  }

  void training(const std::string& backend) {
    BenchOptions options = options_;
    options.rounds = std::min(options.rounds_or_default(), 3);  // One takes some 10 seconds.
    options.backends = {backend};
    const auto row = run(bench_train, options).front();
    if (backend == "shm") return add(kSharedTrain, row["ratio"], row);
    add(kTrain, row["ratio"], row);
    const double away = row["accuracy"].get<double>() - row["python_accuracy"].get<double>();
    add(kAccuracy, 100 * std::abs(away), row);
    add(kMemory, row["memory_ratio"], row);
  }

  /// Shared memory's time as a part of Gloo's, both from C++ and in alternation, by size.
  template <size_t N>
  void all_reduce(int64_t ranks, const SizeTarget (&targets)[N]) {
    BenchOptions options = without_python();
    options.backends = {"shm", "gloo"};
    options.devices = {ranks};
    options.sizes.clear();
    for (const auto& target : targets) options.sizes.push_back(target.bytes);
    const auto rows = run(bench_allreduce, options);
    for (size_t i = 0; i < N; ++i) {
      const bool is_barrier = targets[i].bytes == 0;
      const std::string what =
          (is_barrier ? "barrier" : std::string("all-reduce of ") + targets[i].size) + ", " +
          std::to_string(ranks) + " ranks over shared memory: of ";
      const BenchRow details = {{"shm", rows[2 * i]}, {"gloo", rows[2 * i + 1]}};
      const double gloo_us = details["gloo"]["p50_us"];
      add({what + "Gloo's time", targets[i].bound},
          details["shm"]["p50_us"].get<double>() / gloo_us, details);
      if (targets[i].bytes < kLarge) continue;
      add({what + "the bound by memcpy", kOfBound, /*at_most=*/false}, details["shm"]["of_bound"],
          details);
    }
  }

  void strategies() {
    double ddp_us = 0, fsdp_us = 0;
    for (const auto& [strategy, model, bound] : kStrategies) {
      const std::string name = std::string(model) + " step with " + strategy +
                               ", Adam, 2 ranks over shared memory: of Python's time";
      const BenchRow row = step({name.c_str(), bound, model, 2, "shm", strategy, "adam"});
      if (model != std::string("gpt")) continue;
      if (strategy == std::string("ddp")) ddp_us = row["us_per_step"];
      if (strategy == std::string("fsdp")) fsdp_us = row["us_per_step"];
    }
    add(kFsdpOwn, fsdp_us / ddp_us, {{"fsdp_us", fsdp_us}, {"ddp_us", ddp_us}});
  }

  /// Against our own with another setting.
  void own_ratios() {
    BenchOptions options = without_python();
    options.backends = {"shm"};
    options.devices = {1, 2};
    alternate(kTwoOwn, options, "one_rank_us", "two_ranks_us");
    const HalfSupport support = half_support(c10::kCPU, at::kBFloat16);
    if (!support.fast) log_info(kHalf.name + ": " + support.reason);
    if (!support.instructions) return;
    options.batch_size = 100;
    options.models = {"convnet"};
    options.devices = {1};
    options.precisions = {"32-true", "bf16-mixed"};
    alternate(kHalf, options, "full_us", "half_us");
  }

  /// The second of two steps as a multiple of the first, both in turns.
  void alternate(const Target& target, BenchOptions options, const char* first,
                 const char* second) {
    const int rounds = options.rounds;
    options.rounds = 1;
    Figures one, other;
    for (int round = 0; round < rounds; ++round) {
      const BenchRows rows = run(bench_step, options);
      one.push_back(rows.at(0)["us_per_step"]);
      other.push_back(rows.at(1)["us_per_step"]);
    }
    add(target, median_ratio(other, one), {{first, one}, {second, other}});
  }

  void python() {
    BenchRows rows;
    try {
      rows = run(bench_python, options_);
    } catch (const Error& lacking) {
      log_info(std::string("not measured: ") + lacking.what());
      return;
    }
    for (size_t i = 0; i < std::size(kPython); ++i) add(kPython[i], rows.at(i)["ratio"], rows[i]);
  }

  /// As many rounds as with it.
  BenchOptions without_python() const {
    BenchOptions options = options_;
    options.rounds = options_.rounds_or_default();
    options.compare_python = false;
    return options;
  }

  BenchOptions options_;
  BenchRows rows_;
};

}  // namespace

BenchRows bench_targets(BenchRunner& runner) {
  return Targets(runner.options).measure();
}

}  // namespace lockstep::tool
