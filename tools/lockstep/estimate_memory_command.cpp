#include <torch/nn/module.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/models/models.h"
#include "lockstep/optim/optim.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/fsdp/unit_plan.h"
#include "lockstep/parallel/pipeline/pipeline_strategy.h"
#include "lockstep/parallel/strategies/strategies.h"
#include "lockstep/tool/cli.h"
#include "tools/lockstep/bench/bench.h"
#include "tools/lockstep/commands.h"

namespace lockstep::tool {
namespace {

int64_t elements_of(const torch::nn::Module& module) {
  int64_t elements = 0;
  for (const at::Tensor& parameter : module.parameters()) elements += parameter.numel();
  return elements;
}

/// The model's sizes. None of its values is made, so it may be larger than this machine's memory.
MemoryQuestion question_of(const std::string& model) {
  MemoryQuestion question;
  if (model_info(model).from_file) {
    const auto module = make_model(model);
    question.elements = question.largest_unit_elements = elements_of(*module);
    return question;
  }
  const auto module = deferred_init([&] { return make_model(model); });
  question.elements = elements_of(*module);
  for (const auto& unit : detail::plan_units(*module, {}, FsdpOptions{}.min_unit_elements)) {
    int64_t elements = 0;
    for (const auto& parameter : unit.parameters) elements += parameter.tensor.numel();
    question.largest_unit_elements = std::max(question.largest_unit_elements, elements);
  }
  return question;
}

/// Of the largest stage, where stages have equal numbers of parameters as far as layers can be cut.
int64_t largest_stage_of(const std::string& model, int stages) {
  if (model_info(model).from_file || stages < 2) return 0;
  const auto module = deferred_init([&] { return make_model(model); });
  std::vector<Layer> layers;
  for (const auto& [name, part, forward] : module->layers())
    layers.push_back({name, part, forward});
  const auto costs = estimate_layer_costs(layers);
  const auto starts = balance_stages(costs, stages);
  double largest = 0;
  for (size_t stage = 0; stage < starts.size(); ++stage) {
    const size_t end = stage + 1 < starts.size() ? starts[stage + 1] : costs.size();
    double sum = 0;
    for (size_t i = starts[stage]; i < end; ++i) sum += costs[i];
    largest = std::max(largest, sum);
  }
  return static_cast<int64_t>(largest);
}

BenchRow row_of(const std::string& strategy, const MemoryQuestion& question) {
  const MemoryAnswer answer = estimate_memory(strategy, question);
  return {{"strategy", strategy},
          {"ranks", question.ranks},
          {"parameters", question.elements},
          {"state_bytes", answer.state.total()},
          {"parameter_bytes", answer.state.parameters},
          {"gradient_bytes", answer.state.gradients},
          {"optimizer_bytes", answer.state.optimizer},
          {"working_bytes", answer.working}};
}

/// As a table shows it: "state" of "42.9 MB" for "state_bytes".
BenchRow readable(const BenchRow& row) {
  constexpr std::string_view kBytes = "_bytes";
  BenchRow shown;
  for (const auto& [key, value] : row.items()) {
    if (key.ends_with(kBytes)) {
      shown[key.substr(0, key.size() - kBytes.size())] = human_bytes(value.get<uint64_t>());
    } else {
      shown[key] = value;
    }
  }
  return shown;
}

}  // namespace

int estimate_memory_command(const std::vector<std::string>& args) {
  std::string model = "mlp";
  std::vector<std::string> strategies = {"ddp", "zero1", "zero2", "fsdp"};
  std::vector<int64_t> devices = {1, 2, 4, 8};
  std::string optimizer = "adam";
  std::string mesh;
  bool json = false;
  Cli cli("lockstep estimate-memory",
          "Predicts what each rank keeps for training a model, in bytes, before it is made: "
          "parameters, gradients, optimizer state, and work buffers. Activations, the data and the "
          "program itself (some 120 MB) are not included. `lockstep bench memory` measures it.");
  cli.example("lockstep estimate-memory --model gpt --strategy ddp,fsdp --devices 2,8");
  cli.example("lockstep estimate-memory --strategy fsdp --devices 8 --mesh pp=2,dp_shard=-1");
  cli.example("lockstep estimate-memory --model gpt:layers=48,heads=25,channels=1600,context=1024");
  cli.group("What is trained");
  cli.option("--model", model, "A model, with sizes as `lockstep train` takes them", "NAME");
  cli.list("--strategy", strategies, join(estimated_strategies(), ", "));
  cli.option(
      "--mesh", mesh,
      "Dimensions of the ranks, as `lockstep train` takes them; of a pipeline the largest stage "
      "counts, cut by --pipeline-balance parameters",
      "NAME=SIZE,...");
  cli.list("--devices", devices, "Ranks, several one after the other", {1, 1'000'000});
  cli.choice("--optimizer", optimizer, optimizer_names(), "The optimizer");
  cli.group("Output");
  cli.flag("--json", json, "Print one JSON object instead of the table");
  if (!cli.parse(args)) return 0;
  check_model_name("--model", model);
  for (const auto& name : strategies) expect_one_of("--strategy", name, estimated_strategies());
  MemoryQuestion question = question_of(model);
  question.optimizer = optimizer;
  question.mesh = mesh;
  BenchRows rows;
  for (const auto& strategy : strategies) {
    for (const int64_t ranks : devices) {
      question.ranks = static_cast<int>(ranks);
      const DataShare share = data_share(strategy, {.mesh = mesh}, 0, question.ranks);
      question.largest_stage_elements = largest_stage_of(model, question.ranks / share.size);
      const BenchRow row = row_of(strategy, question);
      rows.push_back(json ? row : readable(row));
    }
  }
  print(json ? nlohmann::ordered_json{{"model", model}, {"optimizer", optimizer}, {"results", rows}}
                       .dump(2) +
                   "\n"
             : bench_table(rows));
  return 0;
}

}  // namespace lockstep::tool
