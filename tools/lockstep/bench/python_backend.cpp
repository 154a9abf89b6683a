// `lockstep bench python`: Python's DDP and collectives over the backend "lockstep" against Gloo.
#include <algorithm>

#include "lockstep/base/error.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/bench/runner_impl.h"
#include "tools/lockstep/process.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kRanks = 2;
/// "alone": each rank is a group of its own. What a step costs without the other one, both at once.
constexpr const char* kSides[] = {"lockstep", "gloo", "alone"};

/// The times of the sides, a round each. The last one's are not measured of everything.
struct Times {
  Figures sides[std::size(kSides)];
};

double median_ratio(const Figures& ours, const Figures& theirs) {
  Figures ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  return median(ratios);
}

BenchRow row_of(const std::string& work, const std::string& unit, const Times& times) {
  const auto& [ours, gloo, alone] = times.sides;
  BenchRow row = {{"work", work},
                  {"unit", unit},
                  {"lockstep", median(ours)},
                  {"gloo", median(gloo)},
                  {"ratio", median_ratio(ours, gloo)},
                  {"alone", nullptr},
                  {"alone_ratio", nullptr}};
  if (!alone.empty()) {
    row["alone"] = median(alone);
    row["alone_ratio"] = median_ratio(alone, gloo);
  }
  return row;
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
  const auto in_turns = [&](size_t sides, const std::string& what, const auto& measure) {
    for (int round = 0; round < options.rounds_or_default(); ++round) {
      impl_->progress("Python's " + what, round);
      for (size_t side = 0; side < sides; ++side) measure(side);
    }
  };
  for (const std::string model : {"linear", "mlp", "wide"}) {
    Times times;
    in_turns(3, "step of " + model, [&](size_t side) {
      const Json config = {
          {"kind", "step"},    {"model", model},         {"batch_size", 32},
          {"strategy", "ddp"}, {"optimizer", "sgd"},     {"precision", "32-true"},
          {"warmup", kWarmup}, {"steps", options.steps}, {"backend", kSides[side]}};
      times.sides[side].push_back(impl_->run_ranks(true, config, kRanks)["us_per_step"]);
    });
    rows.push_back(row_of("DDP step of " + model, "us", times));
  }
  const std::pair<int64_t, const char*> sizes[] = {{4, "4 B"}, {437544, "437 KB"}};
  Times reduced[std::size(sizes)];
  in_turns(2, "all-reduce", [&](size_t side) {
    Json config = {{"kind", "allreduce"}, {"warmup", kWarmup}, {"backend", kSides[side]}};
    for (const auto& [bytes, name] : sizes)
      config["sizes"].push_back({{"bytes", bytes}, {"steps", options.steps}});
    const BenchRow result = impl_->run_ranks(true, config, kRanks);
    for (size_t i = 0; i < std::size(sizes); ++i)
      reduced[i].sides[side].push_back(result["p50_us"][i]);
  });
  for (size_t i = 0; i < std::size(sizes); ++i)
    rows.push_back(row_of("all_reduce of " + std::string(sizes[i].second), "us", reduced[i]));
  Times launched;
  in_turns(2, "launch", [&](size_t side) {
    launched.sides[side].push_back(side == 0 ? impl_->python_launch_seconds(kRanks)
                                             : impl_->torchrun_seconds(kRanks));
  });
  rows.push_back(row_of("lockstep run, torchrun: to the first all_reduce and out", "s", launched));
  return rows;
}

}  // namespace lockstep::tool
