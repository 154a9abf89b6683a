// `lockstep bench pipeline`: how much of a pipeline's time is bubble.
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
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/pipeline/schedule.h"
#include "tools/lockstep/bench/bench.h"

namespace lockstep::tool {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
/// backward for its one weight. The pipeline's input wants no gradient: the first stage sleeps for
/// it with its weight.
Layer sleeping_layer(int index, StageCosts costs, double ms) {
  auto stage = std::make_shared<torch::nn::Module>();
  const at::Tensor weight = stage->register_parameter("weight", at::zeros({1}));
  if (index == 0) costs.backward_weight += costs.backward_input;
  return {std::to_string(index), stage, [=](const at::Tensor& x) {
            sleep_ms(costs.forward * ms);
            return SleepInBackward::apply(x, costs.backward_input * ms) +
                   SleepInBackward::apply(weight, costs.backward_weight * ms);
          }};
}

/// Of a batch through stages in threads of this process: the least bubble of some batches, as what
/// else runs on the machine can only add to it.
double measured_bubble(const Case& one, const StageCosts& costs, double ms, int batches) {
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
  for (int i = 0; i < batches; ++i) {
    const auto start = std::chrono::steady_clock::now();
    pipeline.run_batch(work);
    const auto end = std::chrono::steady_clock::now();
    const double length = std::chrono::duration<double, std::milli>(end - start).count();
    least = std::min(least, 1 - busy * ms / (length * one.shape.num_ranks));
  }
  return least;
}

BenchRow row_of(const Case& one, const BenchOptions& options) {
  const StageCosts& costs = options.pipeline.costs;
  const double sleep_ms = options.pipeline.sleep_ms;
  const auto schedule = make_pipeline_schedule(one.name, one.shape);
  const auto timeline = simulate_pipeline(schedule, {{costs}, options.pipeline.transfer});
  const auto& kept = timeline.peak_activations;
  BenchRow row = {{"schedule", one.name},
                  {"ranks", schedule.num_ranks},
                  {"stages", schedule.num_stages},
                  {"micro_batches", schedule.num_micro_batches},
                  {"formula_percent", 100 * bubble_formula(one.name, one.shape, costs)},
                  {"bubble_percent", 100 * timeline.bubble},
                  {"kept_activations", *std::max_element(kept.begin(), kept.end())}};
  if (sleep_ms > 0) {
    bench_progress("pipeline " + one.name + ", " + counted(schedule.num_ranks, "rank"));
    row["measured_percent"] =
        100 * measured_bubble(one, costs, sleep_ms, options.rounds_or_default());
  }
  if (!options.plot.empty()) {
    write_file_atomically(options.plot, draw_as_svg(schedule, timeline));
  }
  return row;
}

}  // namespace

BenchRows bench_pipeline(BenchRunner& runner) {
  const auto& options = runner.options;
  for (const auto& name : options.pipeline.schedules) {
    expect_one_of("--schedule", name, pipeline_schedule_names());
  }
  std::vector<Case> cases;
  for (const auto& name : options.pipeline.schedules) {
    for (const int64_t ranks : options.devices) {
      for (const int64_t micro_batches : options.pipeline.micro_batches) {
        cases.push_back({name,
                         {static_cast<int>(ranks), static_cast<int>(micro_batches),
                          static_cast<int>(options.pipeline.stages_per_rank)}});
      }
    }
  }
  if (!options.plot.empty() && cases.size() > 1) {
    throw UsageError("--plot: a picture is of one schedule, but " + std::to_string(cases.size()) +
                         " are asked for",
                     "give one --schedule, one number of --stages and one of --num-micro-batches");
  }
  BenchRows rows;
  for (const Case& one : cases) rows.push_back(row_of(one, options));
  return rows;
}

}  // namespace lockstep::tool
