// `lockstep bench` step, memory and scaling: training steps of a model.
#include <sys/resource.h>

#include <algorithm>

#include "lockstep/base/words.h"
#include "lockstep/data/dataset.h"
#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/step_bench.h"
#include "tools/lockstep/bench/worker.h"
#include "tools/lockstep/env_report.h"
#include "tools/lockstep/mnist_folder.h"

namespace lockstep::tool {
namespace {

using Json = nlohmann::ordered_json;
using PlainJson = nlohmann::json;

/// Samples of a job whose model does not take MNIST's: as many, but fewer where one costs more.
constexpr int64_t kRandomSamples = 60'000;
constexpr int64_t kCostlySamples = 600;

std::string text_of(const Json& config) {
  const auto word = [&](const char* key) { return config[key].get<std::string>(); };
  return word("kind") + " " + word("model") + ", " + word("strategy") + ", " + word("precision") +
         ", " + counted(config["ranks"].get<int64_t>(), "rank");
}

BenchRow row_of(const Json& config, const std::string& backend) {
  BenchRow row = pick(
      config, {"model", "batch_size", "ranks", "backend", "strategy", "precision", "optimizer"});
  row["backend"] = backend;
  return row;
}

void add_middle_profile(BenchRow& row, const Rounds& rounds, const BenchOptions& options) {
  const Json middle = middle_round(rounds, "us_per_step");
  row["backend"] = middle["backend"];
  row["us_per_step"] = middle["us_per_step"];
  if (!options.trace.empty()) {
    Json metadata = machine_context();
    metadata["threads"] = options.threads;
    metadata.update(row);
    write_trace(options.trace, middle["profiles"], metadata);
  }
  add_profile(row, middle["profiles"]);
}

PlainJson run_profile(const PlainJson& config, const World& world, StepBench& bench) {
  constexpr int64_t kBatches = 16;  // Full ones: a short one would be another step.
  DataLoader loader = bench.make_loader(bench.random_samples(kBatches * bench.batch_size()));
  const auto run = [&](const StepProfilerOptions& options, int64_t steps) {
    StepProfiler profiler(world.group(), options);
    for (int64_t i = 0; i < steps; ++i) bench.profiled_step(profiler, loader);
    return profiler.finish();
  };
  run({}, config.at("warmup"));
  StepProfilerOptions options;
  options.operations = config.at("operations");
  const StepProfile own = run(options, config.at("steps"));
  std::vector<StepBreakdown> steps = analyse(own).steps;
  return {{"us_per_step", typical_step(steps).step},
          {"backend", world.group().backend()},
          {"profiles", world.group().gather_object(to_object(own), 0)}};
}

TensorDataset samples_for(const PlainJson& config, const StepBench& bench) {
  const ModelInfo info = model_info(config.at("model"));
  constexpr int64_t kImage = 28 * 28;
  if (info.per_token || c10::multiply_integers(info.input_shape) != kImage) {
    const int64_t samples = info.regression ? kRandomSamples : kCostlySamples;
    return bench.random_samples(samples / bench.data_shares());
  }
  DatasetOptions options;
  options.data_dir = config.at("folder").get<std::string>();
  return load_dataset("mnist", options).train;
}

/// Seconds of an epoch's steps, by part. They add up to all of them.
PlainJson part_seconds(const StepProfile& profile) {
  StepBreakdown sum;
  for (const StepBreakdown& step : analyse(profile).steps) {
    for (size_t i = 0; i < kStepParts; ++i) sum.parts[i] += step.parts[i];
    sum.exposed += step.exposed;
    sum.rest += step.rest;
  }
  PlainJson parts;
  for (size_t i = 0; i < kStepParts; ++i) {
    parts[step_part_name(static_cast<StepPart>(i))] = sum.parts[i] / 1e6;
  }
  parts["communication"] = sum.exposed / 1e6;
  parts["rest"] = sum.rest / 1e6;
  return parts;
}

std::string line_of(const BenchRow& row) {
  return row["model"].get<std::string>() + ", " + row["strategy"].get<std::string>();
}

/// Against the first row of the same line, which has the fewest ranks.
void add_speedup(BenchRows& rows) {
  for (BenchRow& row : rows) {
    const BenchRow& first = *std::find_if(rows.begin(), rows.end(), [&](const BenchRow& other) {
      return line_of(other) == line_of(row);
    });
    const double more = row["ranks"].get<double>() / first["ranks"].get<double>();
    const double speedup = first["seconds"].get<double>() / row["seconds"].get<double>();
    row["speedup"] = speedup;
    row["efficiency"] = speedup / more;
    BenchRow lost;
    for (const auto& [part, seconds] : row["parts"].items()) {
      lost[part] = seconds.get<double>() - first["parts"][part].get<double>() / more;
    }
    row["lost_s"] = lost;
  }
}

}  // namespace

std::vector<Json> cases_of(const BenchOptions& options, const std::string& kind) {
  std::vector<Json> cases;
  for (const auto& model : options.models) {
    for (const int64_t ranks : options.devices) {
      for (const auto& strategy : options.strategies) {
        for (const auto& precision : options.precisions) {
          // A sample of gpt has 128 tokens.
          const int64_t usual = model.starts_with("gpt") ? 8 : 32;
          cases.push_back({{"kind", kind},
                           {"model", model},
                           {"batch_size", options.batch_size_or(usual)},
                           {"ranks", ranks},
                           {"backend", options.backends.front()},
                           {"strategy", strategy},
                           {"precision", precision},
                           {"optimizer", options.optimizer},
                           {"warmup", std::min(kWarmup, options.steps)},
                           {"steps", options.steps}});
        }
      }
    }
  }
  return cases;
}

PlainJson step_worker(const PlainJson& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  if (config.at("profile")) return run_profile(config, world, bench);
  bench.draw_batch();
  return {{"us_per_step",
           median(timed([&] { bench.step(); }, config.at("warmup"), config.at("steps")))}};
}

BenchRows bench_step(BenchRunner& runner) {
  const auto& options = runner.options;
  BenchRows rows;
  for (Json& config : cases_of(options, "step")) {
    config["profile"] = options.profile;
    config["operations"] = options.operations;
    const bool has_twin = config["strategy"] != "zero2";  // torch.distributed has none.
    const Sides sides = runner.in_turns(text_of(config), config, has_twin);
    for (const auto& backend : options.backends) {
      rows.push_back(row_of(config, backend));
      if (options.profile) {
        add_middle_profile(rows.back(), sides.at(backend), options);
        continue;
      }
      add_comparison(rows.back(), "us_per_step", sides, backend, "/us_per_step");
      if (runner.has_python() && !has_twin)
        rows.back()["python_us_per_step"] = rows.back()["ratio"] = nullptr;
    }
  }
  return rows;
}

PlainJson memory_worker(const PlainJson& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  bench.draw_batch();
  StateBytes bytes;
  // An optimizer has its state after the first step.
  for (int64_t i = 0; i < config.at("steps").get<int64_t>(); ++i) bench.step(&bytes);
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const PlainJson own = {{"rank", world.rank()},
                         {"parameters", bench.parameters()},
                         {"state_bytes", bytes.total()},
                         {"parameter_bytes", bytes.parameters},
                         {"gradient_bytes", bytes.gradients},
                         {"optimizer_bytes", bytes.optimizer},
                         {"peak_rss_bytes", usage.ru_maxrss * 1024}};
  return {{"ranks", world.group().gather_object(own, 0)}};
}

BenchRows bench_memory(BenchRunner& runner) {
  BenchRows rows;
  for (Json& config : cases_of(runner.options, "memory")) {
    config["steps"] = 3;  // What is kept does not change after the first.
    bench_progress(text_of(config));
    const Json result = runner.run_ranks(false, config);
    for (const Json& rank : result["ranks"]) {
      rows.push_back(pick(config, {"strategy", "model", "ranks", "precision"}));
      rows.back().update(pick(rank, {"rank", "parameters", "state_bytes", "parameter_bytes",
                                     "gradient_bytes", "optimizer_bytes", "peak_rss_bytes"}));
    }
  }
  return rows;
}

PlainJson scaling_worker(const PlainJson& config) {
  const World world = join_group(config);
  StepBench bench(config, world);
  const TensorDataset dataset = samples_for(config, bench);
  DataLoader loader = bench.make_loader(dataset);
  const int64_t steps = loader.batches_per_epoch();
  const auto epoch = [&](int64_t count) {
    StepProfiler profiler(world.group());
    for (int64_t i = 0; i < count; ++i) bench.profiled_step(profiler, loader);
    return profiler.finish();
  };
  epoch(std::min(steps, config.at("warmup").get<int64_t>()));
  Rounds epochs;
  for (int64_t i = 0; i < config.at("epochs").get<int64_t>(); ++i) {
    world.group().barrier();
    const auto start = BenchClock::now();
    const StepProfile profile = epoch(steps);
    epochs.push_back({{"seconds", seconds_since(start)}, {"parts", part_seconds(profile)}});
  }
  PlainJson result = middle_round(std::move(epochs), "seconds");
  result.update({{"steps", steps}, {"dataset", dataset.name}, {"samples", dataset.size()}});
  return result;
}

BenchRows bench_scaling(BenchRunner& runner) {
  BenchOptions options = runner.options;
  const BenchData data(options.data_dir);
  std::sort(options.devices.begin(), options.devices.end());
  options.backends.resize(1);
  BenchRows rows;
  for (Json& config : cases_of(options, "scaling")) {
    config["folder"] = data.folder().string();
    config["epochs"] = options.epochs;
    const auto sides = runner.in_turns(text_of(config), options.backends, [&](const auto&) {
      return runner.run_ranks(false, config);
    });
    const Json middle = middle_round(sides.begin()->second, "seconds");
    rows.push_back(row_of(config, config["backend"]));
    rows.back()["dataset"] = middle["dataset"] == "mnist" ? Json(data.name()) : middle["dataset"];
    rows.back().update(pick(middle, {"samples", "steps", "seconds", "parts"}));
  }
  add_speedup(rows);
  if (!options.plot.empty()) write_scaling_plot(options.plot, rows);
  return rows;
}

std::string scaling_text(const BenchRows& rows) {
  std::string text;
  for (const BenchRow& row : rows) {
    text += line_of(row) + ", " + counted(row["ranks"].get<int64_t>(), "rank") + ": " +
            formatted("%.3f s", row["seconds"].get<double>()) + " an epoch of " +
            std::to_string(row["samples"].get<int64_t>()) + " samples (" +
            row["dataset"].get<std::string>() + "), speed-up " +
            formatted("%.2f", row["speedup"].get<double>()) + ", efficiency " +
            formatted("%.0f%%", 100 * row["efficiency"].get<double>());
    std::vector<std::pair<double, std::string>> lost;
    for (const auto& [part, seconds] : row["lost_s"].items()) {
      if (std::abs(seconds.get<double>()) >= 0.0005) lost.emplace_back(seconds, part);
    }
    std::sort(lost.rbegin(), lost.rend());
    for (size_t i = 0; i < lost.size(); ++i) {
      text += (i == 0 ? "; against the ideal: " : ", ") + lost[i].second + " " +
              formatted("%+.3f s", lost[i].first);
    }
    text += "\n";
  }
  return text;
}

}  // namespace lockstep::tool
