#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/words.h"
#include "tools/lockstep/bench/runner_impl.h"
#include "tools/lockstep/bench/scaling.h"
#include "tools/lockstep/env_report.h"
#include "tools/lockstep/mnist_folder.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;

/// One kind of step to be measured over the rounds.
struct StepCase {
  std::string model;
  int64_t ranks = 1;
  std::string strategy;
  std::string precision;

  std::string text() const {
    return "step " + model + ", " + strategy + ", " + precision + ", " + counted(ranks, "rank");
  }
};

std::vector<StepCase> cases_of(const BenchOptions& options, const std::vector<int64_t>& devices) {
  std::vector<StepCase> cases;
  for (const auto& model : options.models) {
    for (const int64_t ranks : devices) {
      for (const auto& strategy : options.strategies) {
        for (const auto& precision : options.precisions) {
          cases.push_back({model, ranks, strategy, precision});
        }
      }
    }
  }
  return cases;
}

Json config_of(const BenchOptions& options, const StepCase& work) {
  return {{"kind", "step"},
          {"model", work.model},
          {"batch_size", options.step_batch_size(work.model)},
          {"strategy", work.strategy},
          {"optimizer", options.optimizer},
          {"precision", work.precision},
          {"warmup", std::min(kWarmup, options.steps)},
          {"steps", options.steps}};
}

BenchRow row_of(const Json& config, int64_t ranks, const std::string& backend) {
  return {{"model", config["model"]},
          {"batch_size", config["batch_size"]},
          {"ranks", ranks},
          {"backend", backend},
          {"strategy", config["strategy"]},
          {"precision", config["precision"]},
          {"optimizer", config["optimizer"]}};
}

/// Python has no ZeRO-2 of its own.
bool has_python_twin(const StepCase& work) {
  return work.strategy != "zero2";
}

}  // namespace

BenchRows BenchRunner::step() {
  const auto& options = impl_->options;
  BenchRows rows;
  for (const StepCase& work : cases_of(options, options.devices_or({1, 2}))) {
    std::map<std::string, Figures> own;
    Figures python;
    Json config = config_of(options, work);
    for (int round = 0; round < options.rounds_or_default(); ++round) {
      impl_->progress(work.text(), round);
      for (const auto& backend : options.backends) {
        config["backend"] = backend;
        own[backend].push_back(impl_->run_ranks(false, config, work.ranks)["us_per_step"]);
      }
      if (impl_->python && has_python_twin(work)) {
        python.push_back(impl_->run_ranks(true, config, work.ranks)["us_per_step"]);
      }
    }
    for (const auto& backend : options.backends) {
      BenchRow row = row_of(config, work.ranks, backend);
      add_comparison(row, "us_per_step", own[backend], python);
      if (impl_->python && python.empty()) row["python_us_per_step"] = row["ratio"] = nullptr;
      rows.push_back(row);
    }
  }
  return rows;
}

BenchRows BenchRunner::profiled_step() {
  const auto& options = impl_->options;
  BenchRows rows;
  for (const StepCase& work : cases_of(options, options.devices_or({2}))) {
    for (const auto& backend : options.backends) {
      Json config = config_of(options, work);
      config["backend"] = backend;
      config["profile"] = true;
      config["operations"] = options.operations;
      std::vector<Json> rounds;
      for (int round = 0; round < options.rounds_or_default(); ++round) {
        impl_->progress(work.text(), round);
        rounds.push_back(impl_->run_ranks(false, config, work.ranks));
      }
      std::sort(rounds.begin(), rounds.end(), [](const Json& a, const Json& b) {
        return a["us_per_step"].get<double>() < b["us_per_step"].get<double>();
      });
      const Json& middle = rounds[(rounds.size() - 1) / 2];
      BenchRow row = row_of(config, work.ranks, middle["backend"]);
      row["us_per_step"] = middle["us_per_step"];
      if (!options.trace.empty()) {
        Json metadata = machine_context();
        metadata["threads"] = options.threads;
        metadata.update(row);
        write_trace(options.trace, middle["profiles"], metadata);
      }
      add_profile(row, middle["profiles"]);
      rows.push_back(row);
    }
  }
  return rows;
}

BenchRows BenchRunner::memory() {
  const auto& options = impl_->options;
  BenchRows rows;
  for (const StepCase& work : cases_of(options, options.devices_or({2}))) {
    Json config = config_of(options, work);
    config["kind"] = "memory";
    config["steps"] = 3;  // What is kept does not change after the first.
    config["backend"] = options.backends.front();
    impl_->progress("memory " + work.text(), 0);
    const Json result = impl_->run_ranks(false, config, work.ranks);
    for (const Json& rank : result["ranks"]) {
      BenchRow row = {{"strategy", work.strategy},
                      {"model", work.model},
                      {"ranks", work.ranks},
                      {"precision", work.precision}};
      for (const char* key : {"rank", "parameters", "state_bytes", "parameter_bytes",
                              "gradient_bytes", "optimizer_bytes", "peak_rss_bytes"}) {
        row[key] = rank[key];
      }
      rows.push_back(row);
    }
  }
  return rows;
}

BenchRows BenchRunner::scaling() {
  const auto& options = impl_->options;
  const BenchData data(options.data_dir);
  std::vector<int64_t> devices = options.devices_or({1, 2});
  std::sort(devices.begin(), devices.end());
  BenchRows rows;
  for (const StepCase& work : cases_of(options, devices)) {
    Json config = config_of(options, work);
    config["kind"] = "scaling";
    config["backend"] = options.backends.front();
    config["folder"] = data.folder().string();
    config["epochs"] = options.epochs;
    std::vector<Json> rounds;
    for (int round = 0; round < options.rounds_or_default(); ++round) {
      impl_->progress("scaling " + work.text(), round);
      rounds.push_back(impl_->run_ranks(false, config, work.ranks));
    }
    std::sort(rounds.begin(), rounds.end(), [](const Json& a, const Json& b) {
      return a["seconds"].get<double>() < b["seconds"].get<double>();
    });
    const Json& middle = rounds[(rounds.size() - 1) / 2];
    BenchRow row = row_of(config, work.ranks, options.backends.front());
    row["dataset"] =
        middle["dataset"] == "mnist" ? data.name() : middle["dataset"].get<std::string>();
    for (const char* key : {"samples", "steps", "seconds", "parts"}) row[key] = middle[key];
    rows.push_back(row);
  }
  add_speedup(rows);
  if (!options.plot.empty()) write_scaling_plot(options.plot, rows);
  return rows;
}

}  // namespace lockstep::tool
