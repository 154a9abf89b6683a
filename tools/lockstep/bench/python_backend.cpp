// `lockstep bench python`: Python's DDP and collectives over the backend "lockstep" against Gloo.
#include <algorithm>

#include "lockstep/base/error.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/bench/process.h"
#include "tools/lockstep/bench/runner_impl.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kRanks = 2;
constexpr const char* kSides[] = {"lockstep", "gloo"};

/// The times of both sides, a round each.
struct Times {
  Figures sides[std::size(kSides)];
};

BenchRow row_of(const std::string& work, const std::string& unit, const Times& times) {
  Figures ratios;
  for (size_t i = 0; i < times.sides[0].size(); ++i)
    ratios.push_back(times.sides[0][i] / times.sides[1][i]);
  return {{"work", work},
          {"unit", unit},
          {"lockstep", median(times.sides[0])},
          {"gloo", median(times.sides[1])},
          {"ratio", median(ratios)}};
}

}  // namespace

bool python_has_lockstep(const PythonFound& python) {
  // Not by the name of the module: a folder of that name in the working folder would do.
  const std::string look = "import importlib.metadata as m; m.version('lockstep')";
  return run_process({{python.path.string(), "-c", look}, {}}, std::chrono::minutes(1)).status == 0;
}

BenchRows BenchRunner::python_backend() {
  const auto& options = impl_->options;
  if (!impl_->python || !python_has_lockstep(*impl_->python))
    throw Error(
        "bench python: " + (impl_->python ? impl_->python->path.string() : std::string("Python")) +
            " has no package lockstep",
        "pip install . in Lockstep's folder, or name the Python that has it by LOCKSTEP_PYTHON");
  BenchRows rows;
  const auto both = [&](const std::string& what, const auto& measure) {
    for (int round = 0; round < options.rounds_or_default(); ++round) {
      impl_->progress("Python's " + what, round);
      for (const char* side : kSides) measure(side);
    }
  };
  for (const std::string model : {"linear", "mlp", "wide"}) {
    Times times;
    both("step of " + model, [&](const std::string& side) {
      const Json config = {{"kind", "step"},    {"model", model},         {"batch_size", 32},
                           {"strategy", "ddp"}, {"optimizer", "sgd"},     {"precision", "32-true"},
                           {"warmup", kWarmup}, {"steps", options.steps}, {"backend", side}};
      times.sides[side != kSides[0]].push_back(
          impl_->run_ranks(true, config, kRanks)["us_per_step"]);
    });
    rows.push_back(row_of("DDP step of " + model, "us", times));
  }
  const std::pair<int64_t, const char*> sizes[] = {{4, "4 B"}, {437544, "437 KB"}};
  Times reduced[std::size(sizes)];
  both("all-reduce", [&](const std::string& side) {
    Json config = {{"kind", "allreduce"}, {"warmup", kWarmup}, {"backend", side}};
    for (const auto& [bytes, name] : sizes)
      config["sizes"].push_back({{"bytes", bytes}, {"steps", options.steps}});
    const BenchRow result = impl_->run_ranks(true, config, kRanks);
    for (size_t i = 0; i < std::size(sizes); ++i)
      reduced[i].sides[side != kSides[0]].push_back(result["p50_us"][i]);
  });
  for (size_t i = 0; i < std::size(sizes); ++i)
    rows.push_back(row_of("all_reduce of " + std::string(sizes[i].second), "us", reduced[i]));
  Times launched;
  both("launch", [&](const std::string& side) {
    const bool ours = side == kSides[0];
    launched.sides[!ours].push_back(ours ? impl_->python_launch_seconds(kRanks)
                                         : impl_->torchrun_seconds(kRanks));
  });
  rows.push_back(row_of("lockstep run, torchrun: to the first all_reduce and out", "s", launched));
  return rows;
}

}  // namespace lockstep::tool
