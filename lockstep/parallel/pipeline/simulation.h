#pragma once

#include <string>
#include <vector>

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {

/// How long a stage takes for a micro-batch, in any unit. A whole backward takes both its halves.
struct StageCosts {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
};

struct PipelineCosts {
  std::vector<StageCosts> stages;  ///< Of each stage; one for all of them when it is the only one.
  double transfer = 0;             ///< Of an activation or gradient between two ranks.
  const StageCosts& of(int stage) const {
    return stages.size() == 1 ? stages.front() : stages.at(static_cast<size_t>(stage));
  }
};

/// A computation and when it ran.
struct TimedAction {
  PipelineAction action;
  double start = 0;
  double end = 0;
};

/// A step of a pipeline in time.
struct PipelineTimeline {
  std::vector<std::vector<TimedAction>> ranks;  ///< Of each rank, in order.
  double length = 0;                            ///< Until the last rank is done.
  double bubble = 0;                            ///< The part of all ranks' time that is idle.
  /// Of each rank: the most micro-batches of its stages that are kept at once for backward.
  std::vector<int> peak_activations;
};

/// Runs a schedule by the clock: a rank computes without a pause when it has what it needs. Throws
/// UsageError for a schedule that cannot run and for costs of another number of stages.
PipelineTimeline simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs);

/// The bubble that the schedule's authors give, for equal stages and no transfer. With p ranks, m
/// micro-batches, v stages a rank, and F, I, W the costs of a stage:
/// - gpipe: (p - 1) / (m + p - 1), also with several stages a rank
/// - 1f1b, interleaved-1f1b: (p - 1) / (m v + p - 1)
/// - zero-bubble: idle for (p - 1) (F + I - W), busy for m v (F + I + W)
double bubble_formula(const std::string& name, const PipelineShape& shape,
                      const StageCosts& costs = {});

/// A timeline as text, a row a rank: letters are F, B, I and W, dots are idle, a column is `unit`.
std::string draw_as_text(const PipelineTimeline& timeline, double unit = 1);
/// The same as a picture, with the numbers of micro-batches and a colour for each kind and stage.
std::string draw_as_svg(const PipelineSchedule& schedule, const PipelineTimeline& timeline);

}  // namespace lockstep
