#include "lockstep/parallel/pipeline/schedule.h"

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

using Op = PipelineOp;

double cost_of(const StageCosts& stage, Op op) {
  if (op == Op::forward) return stage.forward;
  return (op == Op::backward_weight ? 0 : stage.backward_input) +
         (op == Op::backward_input ? 0 : stage.backward_weight);
}

/// What neighbouring stages wait for: of a backward in two halves the first one.
PipelineAction awaited(int stage, const PipelineAction& action) {
  const Op op = action.op == Op::backward_input ? Op::backward : action.op;
  return {stage, op, action.micro_batch};
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
      const std::optional<double> ready = ready_at(action);
      if (!ready) return false;
      const double start = std::max(clock_[rank], *ready);
      clock_[rank] = start + cost_of(costs_.of(action.stage), action.op);
      ended_[awaited(action.stage, action)] = clock_[rank];
      timeline_.ranks[rank].push_back({action, start, clock_[rank]});
      count_kept(rank, action);
    }
    ++next_[rank];
    return true;
  }

  /// When what a neighbouring stage computes has come; none if it has not.
  std::optional<double> ready_at(const PipelineAction& action) const {
    const int from = action.stage + (action.op == Op::forward ? -1 : 1);
    if (action.op == Op::backward_weight || from < 0 || from >= schedule_.num_stages) return 0.0;
    const auto found = ended_.find(awaited(from, action));
    if (found == ended_.end()) return std::nullopt;
    const bool travels = schedule_.rank_of(from) != schedule_.rank_of(action.stage);
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

constexpr double kWidth = 960, kRow = 36, kLeft = 70, kTop = 56, kGap = 6;

/// Later stages of a rank are lighter.
std::string colour(const PipelineSchedule& schedule, const PipelineAction& action) {
  int hue = 210;  // F
  if (action.op == PipelineOp::backward) hue = 140;
  if (action.op == PipelineOp::backward_input) hue = 165;
  if (action.op == PipelineOp::backward_weight) hue = 35;
  const int turn = action.stage / schedule.num_ranks;
  const int light = std::min(90, 62 + 24 * turn / std::max(1, schedule.stages_per_rank()));
  return "hsl(" + std::to_string(hue) + ",65%," + std::to_string(light) + "%)";
}

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

std::string draw_as_svg(const PipelineSchedule& schedule, const PipelineTimeline& timeline) {
  const double height = kTop + (kRow + kGap) * static_cast<double>(timeline.ranks.size()) + 10;
  const double scale = timeline.length > 0 ? (kWidth - kLeft - 10) / timeline.length : 1;
  std::ostringstream svg;
  svg.precision(5);
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << " " << height
      << "\" font-family=\"sans-serif\" font-size=\"12\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << "<text x=\"10\" y=\"20\" font-size=\"15\">" << schedule.name << ", " << schedule.num_ranks
      << " ranks, " << schedule.num_stages << " stages, " << schedule.num_micro_batches
      << " micro-batches: " << 100 * timeline.bubble << "% of the time is bubble</text>\n"
      << "<text x=\"10\" y=\"40\" fill=\"#555\">F forward, B backward, I backward for the input, W "
         "for the weights; the number is the micro-batch, a lighter colour a later stage of the "
         "rank</text>\n";
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    const double y = kTop + (kRow + kGap) * static_cast<double>(rank), middle = y + 0.62 * kRow;
    svg << "<text x=\"10\" y=\"" << middle << "\">rank " << rank << "</text>\n";
    for (const TimedAction& timed : timeline.ranks[rank]) {
      const double x = kLeft + timed.start * scale, width = (timed.end - timed.start) * scale;
      const std::string name = to_string(timed.action);
      svg << "<rect x=\"" << x << "\" y=\"" << y << "\" width=\"" << width << "\" height=\"" << kRow
          << "\" fill=\"" << colour(schedule, timed.action)
          << "\" stroke=\"#333\" stroke-width=\"0.6\"><title>" << name << "</title></rect>\n";
      if (width < 14) continue;
      svg << "<text x=\"" << x + width / 2 << "\" y=\"" << middle << "\" text-anchor=\"middle\">"
          << name.substr(name.find_first_of("FBIW")) << "</text>\n";
    }
  }
  svg << "</svg>\n";
  return svg.str();
}

}  // namespace lockstep
