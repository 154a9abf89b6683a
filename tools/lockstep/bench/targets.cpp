#include <cmath>
#include <cstdio>
#include <map>

#include "lockstep/amp/half_support.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

/// A promise about speed: a figure that is to stay at or below (or at or above) a bound.
struct Target {
  std::string name;
  double bound;
  bool at_most = true;
};

const Target kStepMlp = {"MLP step, 1 rank: of Python's time", 0.70};
const Target kStepLinear = {"linear step, 1 rank: of Python's time", 0.20};
const Target kStepMlp2 = {"MLP step, 2 ranks over Gloo: of Python's time", 1.00};
const Target kStepLinear2 = {"linear step, 2 ranks over Gloo: of Python's time", 1.00};
const Target kTrain = {
    "lockstep train, MLP, 3 epochs, 2 ranks over Gloo, whole process: of Python's time", 0.50};
const Target kAccuracy = {"its accuracy: points away from Python's", 0.3};
const Target kMemory = {"its peak memory of a rank: of Python's", 0.70};
const Target kLoader = {"loader with normalisation on one core: samples/s", 1'000'000, false};
const Target kLaunch = {"lockstep run, 2 ranks to the first all-reduce and out: of torchrun's time",
                        0.20};

// Over shared memory.
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
/// From this size on so much of what copying alone allows; see bench_allreduce_worker.
constexpr int64_t kLarge = 4 << 20;
constexpr double kOfBound = 0.8;
const Target kSharedLinear2 = {"linear step, 2 ranks over shared memory: of Python's time",
                               1.0 / 30};
const Target kSharedMlp2 = {"MLP step, 2 ranks over shared memory: of Python's time", 1.0 / 7};
const Target kSharedMlpOwn = {"MLP step, 2 ranks over shared memory: of its own with 1 rank", 1.2};
const Target kSharedConvnet2 = {"ConvNet step, batch 100, 2 ranks: of Python's time", 0.6};
const Target kSharedWide2 = {"step of 6 x Linear(784, 784), 2 ranks: of Python's time", 0.7};
const Target kSharedTrain = {
    "lockstep train, MLP, 3 epochs, 2 ranks, whole process: of Python's time", 0.1};
constexpr int64_t kGradientsOfMlp = 437544;
constexpr double kManyRanks = 1.0 / 5;

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
const Target kHalf = {"ConvNet step in bf16-mixed, batch 100, 1 rank: of 32-true", 0.65};

/// Python over the backend "lockstep", in the order of BenchRunner::python_backend.
const Target kPython[] = {
    {"Python's DDP step of linear, 2 ranks over lockstep: of Gloo's time", 0.12},
    {"Python's DDP step of the MLP, 2 ranks over lockstep: of Gloo's time", 0.2},
    {"Python's DDP step of 6 x Linear(784, 784), 2 ranks over lockstep: of Gloo's time", 0.65},
    {"Python's all-reduce of 4 B, 2 ranks over lockstep: of Gloo's time", 0.05},
    {"Python's all-reduce of 437 KB, 2 ranks over lockstep: of Gloo's time", 0.1},
    {"lockstep run, 2 Python ranks to the first all-reduce and out: of torchrun's time", 0.6}};

BenchRow judged(const Target& target, double measured, const BenchRow& details) {
  const bool met = target.at_most ? measured <= target.bound : measured >= target.bound;
  return {{"target", target.name},
          {"bound", target.bound},
          {"at_most", target.at_most},
          {"measured", measured},
          {"met", met},
          {"details", details}};
}

BenchRow step_row(BenchOptions options, const std::string& model, int64_t ranks) {
  options.models = {model};
  options.devices = {ranks};
  return BenchRunner(options).step().front();
}

/// The time of a step of two ranks as a multiple of one rank's, both in alternation.
std::pair<double, BenchRow> two_against_one(BenchOptions options, const std::string& model) {
  const int64_t rounds = options.rounds_or_default();
  options.compare_python = false;
  options.rounds = 1;
  std::vector<double> one, two;
  for (int64_t round = 0; round < rounds; ++round) {
    one.push_back(step_row(options, model, 1)["us_per_step"]);
    two.push_back(step_row(options, model, 2)["us_per_step"]);
  }
  const BenchRow details = {{"one_rank_us", one}, {"two_ranks_us", two}};
  return {median(two) / median(one), details};
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value >= 1000 ? "%.0f" : value < 0.1 ? "%.4f" : "%.2f", value);
  return text;
}

void print(const BenchRow& row) {
  const std::string bound = std::string(row["at_most"].get<bool>() ? "at most " : "at least ") +
                            number(row["bound"].get<double>());
  std::printf("%-74s %-18s %9s  %s\n", row["target"].get<std::string>().c_str(), bound.c_str(),
              number(row["measured"].get<double>()).c_str(),
              row["met"].get<bool>() ? "met" : "NOT MET");
  std::fflush(stdout);
}

/// Shared memory's time as a part of Gloo's, both from C++ and in alternation, by size.
template <class Add>
void all_reduce_targets(const BenchOptions& given, const Add& add) {
  BenchOptions options = given;
  options.compare_python = false;
  options.rounds = given.rounds_or_default();
  options.backends = {"shm", "gloo"};
  const auto compare = [&](int64_t ranks, const std::vector<int64_t>& sizes, const auto& tell) {
    options.devices = {ranks};
    options.sizes = sizes;
    const auto rows = BenchRunner(options).allreduce();
    for (size_t i = 0; i + 1 < rows.size(); i += 2) {
      const BenchRow details = {{"shm", rows[i]}, {"gloo", rows[i + 1]}};
      tell(i / 2, rows[i]["p50_us"].get<double>() / rows[i + 1]["p50_us"].get<double>(), details);
    }
  };
  std::vector<int64_t> sizes;
  for (const auto& target : kAllReduce) sizes.push_back(target.bytes);
  compare(2, sizes, [&](size_t i, double ratio, const BenchRow& details) {
    const std::string size = kAllReduce[i].size;
    add({(size.empty() ? "barrier" : "all-reduce of " + size) +
             ", 2 ranks over shared memory: of Gloo's time",
         kAllReduce[i].bound},
        ratio, details);
    if (kAllReduce[i].bytes < kLarge) return;
    add({"all-reduce of " + size + ", 2 ranks over shared memory: of the bound by memcpy", kOfBound,
         /*at_most=*/false},
        details["shm"]["of_bound"], details);
  });
  for (const int64_t ranks : {4, 8}) {
    compare(ranks, {kGradientsOfMlp}, [&](size_t, double ratio, const BenchRow& details) {
      add({"all-reduce of 437 KB, " + std::to_string(ranks) +
               " ranks over shared memory: of Gloo's time",
           kManyRanks},
          ratio, details);
    });
  }
}

template <class Add>
void strategy_targets(const BenchOptions& given, const Add& add) {
  BenchOptions options = given;
  options.optimizer = "adam";
  std::map<std::string, double> gpt_us;
  for (const auto& [strategy, model, bound] : kStrategies) {
    BenchOptions one = options;
    one.strategies = {strategy};
    if (model == std::string("gpt")) {  // A step of Python's takes almost a second.
      one.steps = std::min<int64_t>(options.steps, 10);
      one.rounds = std::min(options.rounds_or_default(), 3);
    }
    const BenchRow row = step_row(one, model, 2);
    if (model == std::string("gpt")) gpt_us[strategy] = row["us_per_step"];
    add({std::string(model) + " step with " + strategy +
             ", Adam, 2 ranks over shared memory: of Python's time",
         bound},
        row["ratio"], row);
  }
  add(kFsdpOwn, gpt_us["fsdp"] / gpt_us["ddp"],
      {{"fsdp_us", gpt_us["fsdp"]}, {"ddp_us", gpt_us["ddp"]}});
}

/// 16 bits against 32, both in alternation.
template <class Add>
void precision_target(BenchOptions options, const Add& add) {
  const HalfSupport support = half_support(c10::kCPU, at::kBFloat16);
  if (!support.fast) log_info(kHalf.name + ": " + support.reason);
  if (!support.instructions) return;
  const int rounds = options.rounds_or_default();
  options.compare_python = false;
  options.rounds = 1;
  options.batch_size = 100;
  options.models = {"convnet"};
  options.devices = {1};
  options.precisions = {"32-true", "bf16-mixed"};
  std::vector<double> full, half, ratios;
  for (int round = 0; round < rounds; ++round) {
    const BenchRows rows = BenchRunner(options).step();
    full.push_back(rows[0]["us_per_step"]);
    half.push_back(rows[1]["us_per_step"]);
    ratios.push_back(half.back() / full.back());
  }
  add(kHalf, median(ratios), {{"full_us", full}, {"half_us", half}});
}

template <class Add>
void python_targets(const BenchOptions& options, const Add& add) {
  BenchRows rows;
  try {
    rows = BenchRunner(options).python_backend();
  } catch (const Error& lacking) {
    log_info(std::string("not measured: ") + lacking.what());
    return;
  }
  for (size_t i = 0; i < std::size(kPython); ++i) add(kPython[i], rows.at(i)["ratio"], rows.at(i));
}

}  // namespace

BenchRows bench_targets(BenchOptions options, bool print_table) {
  options.compare_python = true;
  options.backends = {"gloo"};
  options.batch_size = 0;
  options.epochs = 3;
  if (print_table) std::printf("%-74s %-18s %9s\n", "figure", "target", "measured");
  BenchRows rows;
  const auto add = [&](const Target& target, double measured, const BenchRow& details) {
    rows.push_back(judged(target, measured, details));
    if (print_table) print(rows.back());
  };
  const auto add_step = [&](const Target& target, const std::string& model, int64_t ranks) {
    const auto row = step_row(options, model, ranks);
    add(target, row["ratio"], row);
  };
  add_step(kStepMlp, "mlp", 1);
  add_step(kStepLinear, "linear", 1);
  add_step(kStepMlp2, "mlp", 2);
  add_step(kStepLinear2, "linear", 2);

  BenchOptions few = options;  // A round takes some 10 seconds.
  few.rounds = std::min(options.rounds_or_default(), 3);
  const auto train = BenchRunner(few).train().front();
  add(kTrain, train["ratio"], train);
  const double points =
      100 * std::abs(train["accuracy"].get<double>() - train["python_accuracy"].get<double>());
  add(kAccuracy, points, train);
  add(kMemory, train["memory_ratio"], train);

  BenchOptions shared = options;
  shared.backends = {"shm"};
  const auto add_shared = [&](const Target& target, const std::string& model, int64_t ranks,
                              int64_t batch_size) {
    shared.batch_size = batch_size;
    const auto row = step_row(shared, model, ranks);
    add(target, row["ratio"], row);
  };
  all_reduce_targets(shared, add);
  add_shared(kSharedLinear2, "linear", 2, 0);
  add_shared(kSharedMlp2, "mlp", 2, 0);
  const auto [times, details] = two_against_one(shared, "mlp");
  add(kSharedMlpOwn, times, details);
  add_shared(kSharedConvnet2, "convnet", 2, 100);
  add_shared(kSharedWide2, "wide", 2, 0);
  shared.batch_size = 0;
  strategy_targets(shared, add);
  precision_target(shared, add);
  few.backends = {"shm"};
  const auto shared_train = BenchRunner(few).train().front();
  add(kSharedTrain, shared_train["ratio"], shared_train);

  const auto loader = BenchRunner(options).loader().front();
  add(kLoader, loader["samples_per_s"], loader);
  const auto launch = BenchRunner(options).launch().front();
  add(kLaunch, launch["ratio"], launch);
  python_targets(options, add);
  return rows;
}

}  // namespace lockstep::tool
