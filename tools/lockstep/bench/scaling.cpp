#include "tools/lockstep/bench/scaling.h"

#include <algorithm>
#include <cstdio>

#include "lockstep/base/words.h"
#include "lockstep/data/dataset.h"
#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/step_bench.h"
#include "tools/lockstep/bench/worker.h"

namespace lockstep::tool {
namespace {

using PlainJson = nlohmann::json;

/// Samples of a job whose model does not take MNIST's: as many, but fewer where one costs more.
constexpr int64_t kRandomSamples = 60'000;
constexpr int64_t kCostlySamples = 600;

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

std::string with_digits(double value, const char* format) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

PlainJson bench_scaling_worker(const PlainJson& config) {
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
  std::vector<std::pair<double, PlainJson>> epochs;
  for (int64_t i = 0; i < config.at("epochs").get<int64_t>(); ++i) {
    world.group().barrier();
    const auto start = BenchClock::now();
    const StepProfile profile = epoch(steps);
    epochs.emplace_back(seconds_since(start), part_seconds(profile));
  }
  std::sort(epochs.begin(), epochs.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto& [seconds, parts] = epochs[(epochs.size() - 1) / 2];
  return {{"seconds", seconds},
          {"parts", parts},
          {"steps", steps},
          {"dataset", dataset.name},
          {"samples", dataset.size()}};
}

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

std::string scaling_text(const BenchRows& rows) {
  std::string text;
  for (const BenchRow& row : rows) {
    text += line_of(row) + ", " + counted(row["ranks"].get<int64_t>(), "rank") + ": " +
            with_digits(row["seconds"], "%.3f") + " s an epoch of " +
            std::to_string(row["samples"].get<int64_t>()) + " samples (" +
            row["dataset"].get<std::string>() + "), speed-up " +
            with_digits(row["speedup"], "%.2f") + ", efficiency " +
            with_digits(100 * row["efficiency"].get<double>(), "%.0f%%");
    std::vector<std::pair<double, std::string>> lost;
    for (const auto& [part, seconds] : row["lost_s"].items()) {
      if (std::abs(seconds.get<double>()) >= 0.0005) lost.emplace_back(seconds, part);
    }
    std::sort(lost.rbegin(), lost.rend());
    for (size_t i = 0; i < lost.size(); ++i) {
      text += (i == 0 ? "; against the ideal: " : ", ") + lost[i].second + " " +
              with_digits(lost[i].first, "%+.3f s");
    }
    text += "\n";
  }
  return text;
}

}  // namespace lockstep::tool
