#include "lockstep/parallel/strategies/strategies.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"
#include "lockstep/parallel/strategies/strategy_rows.h"
#include "lockstep/parallel/training_mesh.h"

namespace lockstep {
namespace {

/// How many numbers an optimizer keeps for each parameter that it updates.
int64_t numbers_kept(const std::string& optimizer, const OptimizerOptions& options) {
  if (optimizer == "sgd") return options.momentum != 0 ? 1 : 0;
  if (optimizer == "adam" || optimizer == "adamw") return options.amsgrad ? 3 : 2;
  if (optimizer == "rmsprop")
    return 1 + (options.momentum != 0 ? 1 : 0) + (options.centered ? 1 : 0);
  if (optimizer == "adagrad") return 1;
  // Once the history is full: two vectors of an iteration, the last direction and gradient.
  if (optimizer == "lbfgs") return 2 * options.history_size + 2;
  throw UsageError(unknown_word("optimizer", optimizer, optimizer_names()));
}

int64_t share_of(int64_t elements, int64_t ranks) {
  return (elements + ranks - 1) / ranks;
}

/// How many ranks a mesh has of a dimension.
int64_t size_of(const std::vector<MeshDimension>& mesh, const std::string& name) {
  const auto found = std::ranges::find(mesh, name, &MeshDimension::name);
  return found == mesh.end() ? 1 : found->size;
}

}  // namespace

std::vector<std::string> estimated_strategies() {
  std::vector<std::string> names;
  for (const auto& row : detail::strategy_rows()) {
    if (row.make_row) names.push_back(row.info.name);
  }
  return names;
}

MemoryAnswer estimate_memory(const std::string& strategy, const MemoryQuestion& question) {
  expect_one_of("strategy", strategy, estimated_strategies());
  const detail::StrategyRow& row = detail::strategy_row(strategy);
  if (question.elements < 1 || question.ranks < 1 || question.element_bytes < 1)
    throw UsageError("estimate_memory: " + std::to_string(question.elements) + " elements of " +
                     std::to_string(question.element_bytes) + " bytes on " +
                     std::to_string(question.ranks) + " ranks; expected 1 or more of each");
  if (question.optimizer == "lbfgs" && row.cuts.optimizer)
    throw UsageError("strategy " + strategy +
                         ": the optimizer lbfgs looks at all parameters as one "
                         "vector, of which a rank has a part only",
                     "ask for strategy ddp, or another optimizer");
  const auto mesh = detail::training_mesh({strategy, row.cuts.any(), row.pipelines}, question.mesh,
                                          question.ranks);
  const int64_t stages = size_of(mesh, "pp"), shards = size_of(mesh, "dp_shard");
  const int64_t trained =
      std::max(share_of(question.elements, stages), question.largest_stage_elements);
  const auto bytes = [&](bool cut, int64_t elements) {
    return share_of(elements, cut ? shards : 1) * question.element_bytes;
  };
  MemoryAnswer answer;
  answer.state.parameters =
      bytes(row.cuts.parameters, trained + share_of(question.frozen_elements, stages));
  answer.state.gradients = bytes(row.cuts.gradients, trained);
  answer.state.optimizer = bytes(row.cuts.optimizer, trained) *
                           numbers_kept(question.optimizer, question.optimizer_options);
  const bool is_pipeline = row.pipelines || question.mesh.find("pp=") != std::string::npos;
  const bool gathers = row.cuts.parameters && !question.shared_memory && shards > 1;
  const int64_t unit = std::max<int64_t>(question.largest_unit_elements, 1);
  if (is_pipeline) {
    // Gradients add up over the micro-batches, with the whole stage gathered.
    if (row.cuts.gradients) answer.working += trained * question.element_bytes;
    if (gathers) answer.working += trained * question.gathered_element_bytes;
  } else if (row.cuts.parameters) {
    // The unit in use, the one before and the one to come, and two buffers of gradients.
    constexpr int64_t kWhole = 3, kStaged = 2;
    answer.working = kStaged * unit * question.element_bytes;
    if (gathers) answer.working += kWhole * unit * question.gathered_element_bytes;
  }
  return answer;
}

}  // namespace lockstep
