// `lockstep bench` step, memory and scaling: training steps of a model.
#include <sys/resource.h>

#include <algorithm>
#include <array>

#include "lockstep/base/words.h"
#include "lockstep/train/step_profiler.h"
#include "tools/lockstep/bench/step_bench.h"
#include "tools/lockstep/env_report.h"

namespace lockstep::tool {
namespace {

/// Samples of a job: as many as MNIST has, but fewer where one costs more.
constexpr int64_t kSamples = 60'000;
constexpr int64_t kCostlySamples = 600;

std::string text_of(const BenchRow& config) {
  const auto word = [&](const char* key) { return config[key].get<std::string>(); };
  return word("kind") + " " + word("model") + ", " + word("strategy") + ", " + word("precision") +
         ", " + counted(config["ranks"].get<int64_t>(), "rank");
}

BenchRow row_of(const BenchRow& config, const std::string& backend) {
  BenchRow row = pick(
      config, {"model", "batch_size", "ranks", "backend", "strategy", "precision", "optimizer"});
  row["backend"] = backend;
  return row;
}

/// As many as fit on a screen; a trace has them all.
constexpr size_t kOperationsShown = 20;

/// What comes after "step" is no part of the sum: it ran beside the others.
constexpr const char* kLines[] = {"data",      "forward", "backward", "communication exposed",
                                  "optimizer", "rest",    "step",     "communication hidden"};

/// Microseconds, by line.
std::array<double, std::size(kLines)> lines_of(const StepBreakdown& step) {
  const auto part = [&](StepPart which) { return step.parts[static_cast<size_t>(which)]; };
  return {part(StepPart::data),
          part(StepPart::forward),
          part(StepPart::backward),
          step.exposed,
          part(StepPart::optimizer),
          step.rest,
          step.step,
          step.hidden};
}

Figures figures_of(const std::vector<StepBreakdown>& steps, size_t line) {
  Figures figures;
  for (const auto& step : steps) figures.push_back(lines_of(step)[line]);
  return figures;
}

std::vector<StepProfile> profiles_from(const PlainJson& objects) {
  std::vector<StepProfile> profiles;
  for (const auto& object : objects) profiles.push_back(profile_from(object));
  return profiles;
}

/// An operation's name without what they all have in common.
std::string short_name(const std::string& name) {
  constexpr const char* kEngine = "autograd::engine::evaluate_function: ";
  return name.starts_with(kEngine) ? "engine: " + name.substr(std::string(kEngine).size()) : name;
}

/// Sets `profile` and `operations`, from the ranks' profiles.
void add_profile(BenchRow& row, const PlainJson& objects) {
  const auto profiles = profiles_from(objects);
  std::vector<StepBreakdown> first, typical;  // Rank 0's steps, and one of each rank.
  for (const auto& profile : profiles) {
    auto steps = analyse(profile).steps;
    typical.push_back(typical_step(steps));
    if (first.empty()) first = std::move(steps);
  }
  const double whole = typical.front().step;
  row["profile"] = BenchRow::array();
  for (size_t line = 0; line < std::size(kLines); ++line) {
    const Figures of_ranks = figures_of(typical, line);
    const auto [least, most] = std::minmax_element(of_ranks.begin(), of_ranks.end());
    row["profile"].push_back({{"part", kLines[line]},
                              {"us", of_ranks.front()},
                              {"share", of_ranks.front() / whole},
                              {"median_us", median(figures_of(first, line))},
                              {"rank_min_us", *least},
                              {"rank_max_us", *most}});
  }
  if (profiles.front().operations.empty()) return;
  row["operations"] = BenchRow::array();
  for (const auto& cost : operation_costs(profiles.front())) {
    row["operations"].push_back({{"operation", short_name(cost.name)},
                                 {"calls", cost.calls},
                                 {"us", cost.self_us},
                                 {"share", cost.self_us / whole}});
  }
}

void add_middle_profile(BenchRow& row, const Rounds& rounds, const BenchOptions& options) {
  const BenchRow middle = middle_round(rounds, "us_per_step");
  row["backend"] = middle["backend"];
  row["us_per_step"] = middle["us_per_step"];
  if (!options.trace.empty()) {
    BenchRow metadata = machine_context();
    metadata["threads"] = options.threads;
    metadata.update(row);
    const auto trace = chrome_trace(profiles_from(middle["profiles"]), metadata);
    write_file_atomically(options.trace, trace.dump() + "\n");
  }
  add_profile(row, middle["profiles"]);
}

PlainJson run_profile(const PlainJson& config, const World& world, StepBench& bench) {
  constexpr int64_t kBatches = 16;  // Full ones: a short one would be another step.
  DataLoader loader = bench.make_loader(bench.random_samples(kBatches * bench.batch_size()));
  bench.profile(loader, config.at("warmup"));
  StepProfilerOptions options;
  options.operations = config.at("operations");
  const StepProfile own = bench.profile(loader, config.at("steps"), options);
  std::vector<StepBreakdown> steps = analyse(own).steps;
  return {{"us_per_step", typical_step(steps).step},
          {"backend", world.group().backend()},
          {"profiles", world.group().gather_object(to_object(own), 0)}};
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

std::vector<BenchRow> cases_of(const BenchOptions& options, const std::string& kind) {
  std::vector<BenchRow> cases;
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
                           {"mesh", options.mesh},
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

std::string step_text(const BenchRows& rows) {
  if (!rows.front().contains("profile")) return bench_table(rows);
  std::string text;
  for (const auto& row : rows) {
    if (!text.empty()) text += '\n';
    text += row["model"].get<std::string>() + ", batch " +
            std::to_string(row["batch_size"].get<int64_t>()) + ", " +
            counted(row["ranks"].get<int64_t>(), "rank") + " over " +
            row["backend"].get<std::string>() + "\n";
    text += bench_table(row["profile"].get<BenchRows>());
    if (!row.contains("operations")) continue;
    auto operations = row["operations"].get<BenchRows>();
    if (operations.size() > kOperationsShown) operations.resize(kOperationsShown);
    text += '\n' + bench_table(operations);
  }
  return text;
}

BenchRows bench_step(BenchRunner& runner) {
  const auto& options = runner.options;
  BenchRows rows;
  for (BenchRow& config : cases_of(options, "step")) {
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
  for (BenchRow& config : cases_of(runner.options, "memory")) {
    config["steps"] = 3;  // What is kept does not change after the first.
    bench_progress(text_of(config));
    const BenchRow result = runner.run_ranks(false, config);
    for (const BenchRow& rank : result["ranks"]) {
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
  const ModelInfo info = model_info(config.at("model"));
  const bool costly = info.per_token || c10::multiply_integers(info.input_shape) > 28 * 28;
  const TensorDataset dataset = bench.random_samples((costly ? kCostlySamples : kSamples) /
                                                     bench.strategy().data_share().size);
  DataLoader loader = bench.make_loader(dataset);
  const int64_t steps = loader.batches_per_epoch();
  bench.profile(loader, std::min(steps, config.at("warmup").get<int64_t>()));
  Rounds epochs;
  for (int64_t i = 0; i < config.at("epochs").get<int64_t>(); ++i) {
    world.group().barrier();
    const auto start = BenchClock::now();
    const StepProfile profile = bench.profile(loader, steps);
    epochs.push_back({{"seconds", seconds_since(start)}, {"parts", part_seconds(profile)}});
  }
  PlainJson result = middle_round(std::move(epochs), "seconds");
  result.update({{"steps", steps}, {"samples", dataset.size()}});
  return result;
}

BenchRows bench_scaling(BenchRunner& runner) {
  BenchOptions options = runner.options;
  std::sort(options.devices.begin(), options.devices.end());
  options.backends.resize(1);
  BenchRows rows;
  for (BenchRow& config : cases_of(options, "scaling")) {
    config["epochs"] = options.epochs;
    const auto sides = runner.in_turns(text_of(config), options.backends, [&](const auto&) {
      return runner.run_ranks(false, config);
    });
    const BenchRow middle = middle_round(sides.begin()->second, "seconds");
    rows.push_back(row_of(config, config["backend"]));
    rows.back().update(pick(middle, {"samples", "steps", "seconds", "parts"}));
  }
  add_speedup(rows);
  return rows;
}

std::string scaling_text(const BenchRows& rows) {
  std::string text;
  for (const BenchRow& row : rows) {
    text += line_of(row) + ", " + counted(row["ranks"].get<int64_t>(), "rank") + ": " +
            formatted("%.3f s", row["seconds"].get<double>()) + " an epoch of " +
            std::to_string(row["samples"].get<int64_t>()) + " samples, speed-up " +
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
