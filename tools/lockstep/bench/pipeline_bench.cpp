#include "tools/lockstep/bench/pipeline_bench.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/pipeline/local_pipeline.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "lockstep/tool/cli.h"
#include "lockstep/tool/output_file.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/env_report.h"

namespace lockstep::tool {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Options {
  std::vector<std::string> schedules = pipeline_schedule_names();
  std::vector<int64_t> ranks = {2, 4};
  std::vector<int64_t> micro_batches = {8};
  int64_t stages_per_rank = 0;
  StageCosts costs;
  double transfer = 0;
  double sleep_ms = 0;
  std::string plot;
};

struct Case {
  std::string name;
  PipelineShape shape;
};

void sleep_ms(double ms) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

/// Gives its input on, and sleeps in backward.
struct SleepInBackward : torch::autograd::Function<SleepInBackward> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, double ms) {
    context->saved_data["ms"] = ms;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    sleep_ms(context->saved_data["ms"].toDouble());
    return {gradients[0], at::Tensor()};
  }
};

/// A stage that takes as long as it is told to: in forward, in backward for its input, and in
/// backward for its one weight.
struct SleepingStage : torch::nn::Module {
  SleepingStage() { weight = register_parameter("weight", at::zeros({1})); }
  at::Tensor weight;
};

/// The pipeline's input wants no gradient: the first stage sleeps for it with its weight.
Layer sleeping_layer(int index, StageCosts costs, double ms) {
  auto stage = std::make_shared<SleepingStage>();
  if (index == 0) costs.backward_weight += costs.backward_input;
  return {std::to_string(index), stage, [=](const at::Tensor& x) {
            sleep_ms(costs.forward * ms);
            return SleepInBackward::apply(x, costs.backward_input * ms) +
                   SleepInBackward::apply(stage->weight, costs.backward_weight * ms);
          }};
}

/// Of a batch through stages in threads of this process: the least bubble of some batches, as what
/// else runs on the machine can only add to it.
double measured_bubble(const Case& one, const StageCosts& costs, double ms) {
  const auto schedule = make_pipeline_schedule(one.name, one.shape);
  std::vector<Layer> layers;
  for (int i = 0; i < schedule.num_stages; ++i) layers.push_back(sleeping_layer(i, costs, ms));
  const std::vector<c10::Device> devices(static_cast<size_t>(one.shape.num_ranks), c10::kCPU);
  LocalPipelineOptions options;
  options.schedule = one.name;
  options.num_micro_batches = one.shape.num_micro_batches;
  options.stages_per_device = one.shape.stages_per_rank;
  LocalPipeline pipeline(layers, devices, options);
  BatchWork work;
  work.input = at::ones({one.shape.num_micro_batches, 1});
  work.target = work.input;
  work.criterion = [](const at::Tensor& output, const at::Tensor&) { return output.mean(); };
  const double all = costs.forward + costs.backward_input + costs.backward_weight;
  const double busy = static_cast<double>(schedule.num_stages) * one.shape.num_micro_batches * all;
  double least = 1;
  constexpr int kBatches = 3;
  for (int i = 0; i < kBatches; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pipeline.run_batch(work);
    const auto end = std::chrono::steady_clock::now();
    const double length = std::chrono::duration<double, std::milli>(end - start).count();
    least = std::min(least, 1 - busy * ms / (length * one.shape.num_ranks));
  }
  return least;
}

std::vector<Case> cases_of(const Options& options) {
  std::vector<Case> cases;
  for (const auto& name : options.schedules) {
    for (const int64_t ranks : options.ranks) {
      for (const int64_t micro_batches : options.micro_batches) {
        cases.push_back({name,
                         {static_cast<int>(ranks), static_cast<int>(micro_batches),
                          static_cast<int>(options.stages_per_rank)}});
      }
    }
  }
  return cases;
}

BenchRow row_of(const Case& one, const Options& options) {
  const auto schedule = make_pipeline_schedule(one.name, one.shape);
  const auto timeline = simulate_pipeline(schedule, {{options.costs}, options.transfer});
  const double formula = bubble_formula(one.name, one.shape, options.costs);
  const auto& kept = timeline.peak_activations;
  BenchRow row = {{"schedule", one.name},
                  {"ranks", schedule.num_ranks},
                  {"stages", schedule.num_stages},
                  {"micro_batches", schedule.num_micro_batches},
                  {"formula_percent", 100 * formula},
                  {"bubble_percent", 100 * timeline.bubble},
                  {"kept_activations", *std::max_element(kept.begin(), kept.end())}};
  if (options.sleep_ms > 0) {
    bench_progress("pipeline " + one.name + ", " + counted(schedule.num_ranks, "rank"));
    row["measured_percent"] = 100 * measured_bubble(one, options.costs, options.sleep_ms);
  }
  if (!options.plot.empty()) {
    write_file_atomically(options.plot, draw_as_svg(schedule, timeline));
  }
  return row;
}

void add_options(Cli& cli, Options& options) {
  const std::vector<std::string> names = pipeline_schedule_names();
  cli.group("What is measured");
  cli.list("--schedule", options.schedules, "Schedules");
  cli.list("--stages", options.ranks,
           "Ranks of the pipeline, each of which has a stage, or several: see --stages-per-rank",
           {1, 64});
  cli.list("--num-micro-batches", options.micro_batches, "Parts of a batch", {1, 1024});
  cli.option("--stages-per-rank", options.stages_per_rank,
             "0: the schedule's own, 2 for interleaved-1f1b, else 1", {0, 64});
  cli.option("--forward", options.costs.forward, "Time of a stage's forward", {0, 1e6});
  cli.option("--backward-input", options.costs.backward_input,
             "Time of backward for the stage's input", {0, 1e6});
  cli.option("--backward-weight", options.costs.backward_weight,
             "Time of backward for the stage's weights", {0, 1e6});
  cli.option("--transfer", options.transfer, "Time of a message between two ranks", {0, 1e6});
  cli.option("--sleep-ms", options.sleep_ms,
             "Also run the schedule in threads, with stages that sleep this many milliseconds per "
             "unit of time; 0: simulate only",
             {0, 10'000});
}

void check(const Options& options) {
  for (const auto& name : options.schedules) {
    expect_one_of("--schedule", name, pipeline_schedule_names());
  }
  const size_t cases = cases_of(options).size();
  if (!options.plot.empty() && cases > 1) {
    throw UsageError(
        "--plot: a picture is of one schedule, but " + std::to_string(cases) + " are asked for",
        "give one --schedule, one number of --stages and one of --num-micro-batches");
  }
}

}  // namespace

int bench_pipeline(const std::vector<std::string>& args) {
  Options options;
  bool json = false;
  std::string output;
  Cli cli("lockstep bench pipeline", kPipelineBenchSummary);
  add_options(cli, options);
  cli.group("Output");
  cli.option("--plot", options.plot, "Draw the schedule's timeline", "FILE.svg");
  cli.flag("--json", json, "Print one JSON object instead of the table");
  cli.option("--output", output, "Write the JSON object to this file too", "FILE");
  cli.example("lockstep bench pipeline --stages 2,4 --num-micro-batches 4,8 --sleep-ms 20");
  cli.example("lockstep bench pipeline --schedule zero-bubble --stages 4 --plot zero-bubble.svg");
  if (!cli.parse(args)) return 0;
  check(options);
  check_output_file("--plot", options.plot, "pipeline.svg");
  check_output_file("--output", output, "bench.json");
  BenchRows rows;
  for (const Case& one : cases_of(options)) rows.push_back(row_of(one, options));
  bench_progress("");
  const BenchRow report = {
      {"benchmark", "pipeline"}, {"context", machine_context()}, {"results", rows}};
  const std::string text = report.dump(2) + "\n";
  if (!output.empty()) write_file_atomically(output, text);
  print(json ? text : bench_table(rows));
  return 0;
}

}  // namespace lockstep::tool
