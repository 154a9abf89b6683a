#include "lockstep/parallel/strategies/strategies.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

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

/// What of the model each rank keeps.
struct Kept {
  bool parameters, gradients;  ///< A share; else all.
  bool optimizer;
};

Kept kept_by(const std::string& strategy) {
  if (strategy == "ddp") return {false, false, false};
  if (strategy == "zero1") return {false, false, true};
  if (strategy == "zero2") return {false, true, true};
  if (strategy == "fsdp") return {true, true, true};
  throw UsageError(unknown_word("strategy", strategy, estimated_strategies()));
}

}  // namespace

std::vector<std::string> estimated_strategies() {
  return {"ddp", "zero1", "zero2", "fsdp"};
}

MemoryAnswer estimate_memory(const std::string& strategy, const MemoryQuestion& question) {
  const Kept kept = kept_by(strategy);
  if (question.elements < 1 || question.ranks < 1 || question.element_bytes < 1)
    throw UsageError("estimate_memory: " + std::to_string(question.elements) + " elements of " +
                     std::to_string(question.element_bytes) + " bytes on " +
                     std::to_string(question.ranks) + " ranks; expected 1 or more of each");
  if (question.optimizer == "lbfgs" && kept.optimizer)
    throw UsageError("strategy " + strategy +
                         ": the optimizer lbfgs looks at all parameters as one "
                         "vector, of which a rank has a part only",
                     "ask for strategy ddp, or another optimizer");
  const auto of = [&](bool shared, int64_t elements) {
    const int64_t ranks = shared ? question.ranks : 1;
    return (elements + ranks - 1) / ranks * question.element_bytes;
  };
  MemoryAnswer answer;
  answer.state.parameters = of(kept.parameters, question.elements + question.frozen_elements);
  answer.state.gradients = of(kept.gradients, question.elements);
  answer.state.optimizer = of(kept.optimizer, question.elements) *
                           numbers_kept(question.optimizer, question.optimizer_options);
  if (strategy == "fsdp") {
    const int64_t unit = std::max<int64_t>(question.largest_unit_elements, 1);
    // The unit in use, the one before and the one to come, and two buffers of gradients.
    constexpr int64_t kWhole = 3, kStaged = 2;
    answer.working = kStaged * unit * question.element_bytes;
    if (!question.shared_memory && question.ranks > 1)
      answer.working += kWhole * unit * question.gathered_element_bytes;
  }
  return answer;
}

}  // namespace lockstep
