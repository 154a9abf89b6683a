#include <cmath>
#include <cstdio>

#include "bench.h"
#include "lockstep/base/text.h"

namespace lockstep::tool {
namespace {

/// A promise about speed: a figure that is to stay at or below (or at or above) a bound.
struct Target {
  std::string name;
  double bound;
  bool at_most = true;
};

const Target kStepMlp = {"MLP step, 1 rank: of Python's time", 0.70};
const Target kStepLinear = {"linear step, 1 rank: of Python's time", 0.25};
const Target kStepMlp2 = {"MLP step, 2 ranks over Gloo: of Python's time", 1.00};
const Target kStepLinear2 = {"linear step, 2 ranks over Gloo: of Python's time", 1.00};
const Target kTrain = {"lockstep train, MLP, 3 epochs, 2 ranks, whole process: of Python's time",
                       0.50};
const Target kAccuracy = {"its accuracy: points away from Python's", 0.3};
const Target kMemory = {"its peak memory of a rank: of Python's", 0.70};
const Target kLoader = {"loader with normalisation on one core: samples/s", 1'000'000, false};
const Target kLaunch = {"lockstep run, 2 ranks to the first all-reduce and out: of torchrun's time",
                        0.20};

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

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value >= 1000 ? "%.0f" : "%.2f", value);
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

  const auto loader = BenchRunner(options).loader().front();
  add(kLoader, loader["samples_per_s"], loader);
  const auto launch = BenchRunner(options).launch().front();
  add(kLaunch, launch["ratio"], launch);
  return rows;
}

}  // namespace lockstep::tool
