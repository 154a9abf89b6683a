// `lockstep bench python`: Python's DDP and collectives over the backend "lockstep" against Gloo.
#include "lockstep/base/error.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

constexpr int64_t kRanks = 2;

/// A result is a figure.
BenchRow row_of(const std::string& work, const std::string& unit, const Sides& sides,
                const std::string& pointer) {
  const auto figures = [&](const char* side) { return figures_at(sides.at(side), pointer); };
  const Figures gloo = figures("gloo");
  BenchRow row = {{"work", work},
                  {"unit", unit},
                  {"lockstep", median(figures("lockstep"))},
                  {"gloo", median(gloo)},
                  {"ratio", median_ratio(figures("lockstep"), gloo)},
                  {"alone", nullptr},
                  {"alone_ratio", nullptr}};
  if (sides.contains("alone")) {
    row["alone"] = median(figures("alone"));
    row["alone_ratio"] = median_ratio(figures("alone"), gloo);
  }
  return row;
}

}  // namespace

BenchRows bench_python(BenchRunner& runner) {
  const auto& options = runner.options;
  if (!runner.python_has_lockstep())
    throw Error(
        "bench python: " + runner.python().path.string() + " has no package lockstep",
        "pip install . in Lockstep's folder, or name the Python that has it by LOCKSTEP_PYTHON");
  const std::vector<std::string> both = {"lockstep", "gloo"};
  // Each rank is a group of its own: what a step costs without the other one, both at once.
  const std::vector<std::string> and_alone = {"lockstep", "gloo", "alone"};
  const auto run_ranks = [&](const std::string& what, const auto& sides, BenchRow config) {
    config["ranks"] = kRanks;
    config["warmup"] = kWarmup;
    return runner.in_turns("Python's " + what, sides, [&](const std::string& side) {
      config["backend"] = side;
      return runner.run_ranks(/*with_python=*/true, config);
    });
  };
  BenchRows rows;
  for (const std::string model : {"linear", "mlp", "wide"}) {
    const Sides sides = run_ranks("step of " + model, and_alone,
                                  {{"kind", "step"},
                                   {"model", model},
                                   {"batch_size", 32},
                                   {"strategy", "ddp"},
                                   {"optimizer", "sgd"},
                                   {"precision", "32-true"},
                                   {"steps", options.steps}});
    rows.push_back(row_of("DDP step of " + model, "us", sides, "/us_per_step"));
  }
  BenchRow config = {{"kind", "allreduce"}};
  for (const int64_t bytes : {4, 437544})
    config["sizes"].push_back({{"bytes", bytes}, {"steps", options.steps}});
  const Sides reduced = run_ranks("all-reduce", both, config);
  rows.push_back(row_of("all_reduce of 4 B", "us", reduced, "/rows/0/p50_us"));
  rows.push_back(row_of("all_reduce of 437 KB", "us", reduced, "/rows/1/p50_us"));
  const Sides launched =
      runner.in_turns("Python's launch", both, [&](const std::string& side) -> BenchRow {
        if (side == "gloo") return runner.torchrun_seconds(kRanks);
        return runner
            .run_python("lockstep run", "launch.py", {{"backend", side}}, under_run(kRanks, {}))
            .first.seconds;
      });
  rows.push_back(
      row_of("lockstep run, torchrun: to the first all_reduce and out", "s", launched, ""));
  return rows;
}

}  // namespace lockstep::tool
