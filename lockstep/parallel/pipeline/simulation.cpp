#include "lockstep/parallel/pipeline/schedule.h"

#include <algorithm>
#include <map>
#include <optional>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

using Op = PipelineOp;

double cost_of(const PipelineCosts& costs, const PipelineAction& action) {
  const StageCosts& stage = costs.of(action.stage);
  switch (action.op) {
    case Op::forward:
      return stage.forward;
    case Op::backward:
      return stage.backward_input + stage.backward_weight;
    case Op::backward_input:
      return stage.backward_input;
    case Op::backward_weight:
      return stage.backward_weight;
    default:
      return 0;
  }
}

/// The computation of the neighbouring stage that must be done first. Of backward it is "B", which
/// I stands for too.
std::optional<PipelineAction> needed_from_elsewhere(const PipelineSchedule& schedule,
                                                    const PipelineAction& action) {
  if (action.op == Op::forward && action.stage > 0) {
    return PipelineAction{action.stage - 1, Op::forward, action.micro_batch};
  }
  const bool is_backward = action.op == Op::backward || action.op == Op::backward_input;
  if (is_backward && action.stage + 1 < schedule.num_stages) {
    return PipelineAction{action.stage + 1, Op::backward, action.micro_batch};
  }
  return std::nullopt;
}

class Simulation {
 public:
  Simulation(const PipelineSchedule& schedule, const PipelineCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        next_(schedule.actions.size()),
        clock_(schedule.actions.size()) {
    timeline_.ranks.resize(schedule.actions.size());
    timeline_.peak_activations.resize(schedule.actions.size());
  }

  /// No action depends on when another rank's comes, only on that it has come: so each rank can be
  /// taken as far as it gets.
  PipelineTimeline run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < next_.size(); ++rank) {
        while (next_[rank] < schedule_.actions[rank].size() && step(rank)) moved = true;
      }
    }
    finish();
    return std::move(timeline_);
  }

 private:
  /// False when the rank must wait for one that has not come so far.
  bool step(size_t rank) {
    const PipelineAction& action = schedule_.actions[rank][next_[rank]];
    if (is_compute(action.op)) {
      const auto need = needed_from_elsewhere(schedule_, action);
      const std::optional<double> ready = need ? arrival(*need, action.stage) : 0.0;
      if (!ready) return false;
      const double start = std::max(clock_[rank], *ready);
      clock_[rank] = start + cost_of(costs_, action);
      ended_[action] = clock_[rank];
      timeline_.ranks[rank].push_back({action, start, clock_[rank]});
      count_kept(rank, action);
    }
    ++next_[rank];
    return true;
  }

  std::optional<double> arrival(const PipelineAction& need, int stage) const {
    auto found = ended_.find(need);
    if (found == ended_.end() && need.op == Op::backward) {
      found = ended_.find({need.stage, Op::backward_input, need.micro_batch});
    }
    if (found == ended_.end()) return std::nullopt;
    const bool travels = schedule_.rank_of(need.stage) != schedule_.rank_of(stage);
    return found->second + (travels ? costs_.transfer : 0);
  }

  void count_kept(size_t rank, const PipelineAction& action) {
    if (action.op == Op::forward) {
      int& peak = timeline_.peak_activations[rank];
      peak = std::max(peak, ++kept_[rank]);
    } else if (action.op != Op::backward_input) {
      --kept_[rank];
    }
  }

  void finish() {
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (next_[rank] == schedule_.actions[rank].size()) continue;
      throw UsageError("simulate_pipeline: schedule '" + schedule_.name + "' cannot run: rank " +
                       std::to_string(rank) + " waits for ever in " +
                       to_string(schedule_.actions[rank][next_[rank]]));
    }
    double busy = 0;
    for (const auto& actions : timeline_.ranks) {
      for (const TimedAction& timed : actions) busy += timed.end - timed.start;
      if (!actions.empty()) timeline_.length = std::max(timeline_.length, actions.back().end);
    }
    const double all = timeline_.length * static_cast<double>(timeline_.ranks.size());
    timeline_.bubble = all > 0 ? 1 - busy / all : 0;
  }

  const PipelineSchedule& schedule_;
  const PipelineCosts& costs_;
  std::vector<size_t> next_;
  std::vector<double> clock_;
  std::map<size_t, int> kept_;
  std::map<PipelineAction, double> ended_;
  PipelineTimeline timeline_;
};

}  // namespace

PipelineTimeline simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs) {
  if (costs.stages.size() != 1 && costs.stages.size() != static_cast<size_t>(schedule.num_stages)) {
    throw UsageError("simulate_pipeline: costs of " + std::to_string(costs.stages.size()) +
                         " stages, but the schedule has " + std::to_string(schedule.num_stages),
                     "give one for each stage, or one for all");
  }
  return Simulation(schedule, costs).run();
}

double bubble_formula(const std::string& name, const PipelineShape& shape,
                      const StageCosts& costs) {
  const int stages =
      shape.stages_per_rank == 0 ? default_stages_per_rank(name) : shape.stages_per_rank;
  const double hops = shape.num_ranks - 1;
  const double all = costs.forward + costs.backward_input + costs.backward_weight;
  const double work = shape.num_micro_batches * stages * all;
  // Stages one after the other, as gpipe runs several of a rank, hide no hop of each other's.
  double idle = hops * all * (name == "gpipe" ? stages : 1);
  if (name == "zero-bubble") {
    idle = hops * (costs.forward + costs.backward_input - costs.backward_weight);
  }
  return idle / (work + idle);
}

}  // namespace lockstep
