#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// What a rank of a pipeline can do. The letters are those of PyTorch's schedules.
enum class PipelineOp {
  forward,          ///< F
  backward,         ///< B: gradients of the stage's input and of its weights
  backward_input,   ///< I: of the input only
  backward_weight,  ///< W: of the weights only, after I
  send_forward,     ///< SEND_F: the output, to the next stage
  recv_forward,     ///< RECV_F: the input, from the stage before
  send_backward,    ///< SEND_B: the input's gradient, to the stage before
  recv_backward,    ///< RECV_B: the output's gradient, from the next stage
};

bool is_compute(PipelineOp op);

/// One action: "2F0" is the forward of stage 2 for micro-batch 0.
struct PipelineAction {
  int stage = 0;
  PipelineOp op = PipelineOp::forward;
  int micro_batch = 0;
  auto operator<=>(const PipelineAction&) const = default;
};

/// PyTorch's text of an action: "2F0", "1SEND_B3".
std::string to_string(const PipelineAction& action);

/// A schedule is data: what each rank does, in its order. Sends and receives are begun in this
/// order and do not block. A rank waits only before F for its input, and before B or I for the
/// output's gradient.
struct PipelineSchedule {
  std::string name;
  int num_ranks = 1;
  int num_stages = 1;  ///< A multiple of num_ranks.
  int num_micro_batches = 1;
  std::vector<std::vector<PipelineAction>> actions;  ///< A list a rank.

  /// Stages go round: with 2 ranks and 4 stages rank 0 has stages 0 and 2.
  int rank_of(int stage) const { return stage % num_ranks; }
  int stages_per_rank() const { return num_stages / num_ranks; }
};

struct PipelineShape {
  int num_ranks = 1;
  int num_micro_batches = 4;
  /// 0: the schedule's default, 2 for interleaved-1f1b, which needs several, else 1.
  int stages_per_rank = 0;
};

/// The schedules, all of which finish the micro-batches of a stage in their order:
/// - gpipe (Huang et al. 2019): all forwards, then all backwards.
/// - 1f1b (Narayanan et al. 2019, "PipeDream-Flush"): as soon as a stage can, it takes one forward
///   and one backward in turn. The bubble is gpipe's, the memory at most num_ranks activations.
/// - interleaved-1f1b (Narayanan et al. 2021): several stages a rank, so the bubble is divided by
///   their number and sends are multiplied by it. The order is that of PyTorch's
///   ScheduleInterleaved1F1B.
/// - zero-bubble (Qi et al. 2023, ZB-H1): backward in two halves. Only I is awaited by the stage
///   before, and W fills what would be bubble. The memory is 1f1b's. The order is that of PyTorch's
///   ScheduleInterleavedZeroBubble.
///
/// The result has its sends and receives. None can end in a deadlock. Throws UsageError for an
/// unknown name (with the nearest), for numbers below 1, for 1f1b with several stages a rank, and
/// for a number of micro-batches that interleaved rounds do not divide.
PipelineSchedule make_pipeline_schedule(const std::string& name, const PipelineShape& shape);
std::vector<std::string> pipeline_schedule_names();
/// The stages of a rank that `stages_per_rank` 0 stands for.
int default_stages_per_rank(const std::string& name);
/// Whether the schedule can be made for so many micro-batches.
bool fits_pipeline_schedule(const std::string& name, const PipelineShape& shape);

/// The receive without which a computation cannot begin, and the send that follows it. None where
/// nothing goes between ranks.
std::optional<PipelineAction> needed_receive(const PipelineSchedule& schedule,
                                             const PipelineAction& action);
std::optional<PipelineAction> needed_send(const PipelineSchedule& schedule,
                                          const PipelineAction& action);

/// Adds what ranks must send and receive to a schedule of computations. A send follows what it
/// sends. A receive is begun one computation ahead of the one that needs it, so that data can
/// travel while the rank computes. Between stages of one rank nothing is sent.
void add_communication(PipelineSchedule& schedule);

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

/// Simulates a schedule in time: a rank computes as soon as it has what it needs. Throws UsageError
/// for a schedule that cannot run and for costs of another number of stages.
PipelineTimeline simulate_pipeline(const PipelineSchedule& schedule, const PipelineCosts& costs);

/// The bubble that the schedule's authors give, for equal stages and no transfer. With p ranks, m
/// micro-batches, v stages a rank, and F, I, W the costs of a stage:
/// - gpipe: (p - 1) / (m + p - 1), also with several stages a rank
/// - 1f1b, interleaved-1f1b: (p - 1) / (m v + p - 1)
/// - zero-bubble: idle for (p - 1) (F + I - W), busy for m v (F + I + W)
double bubble_formula(const std::string& name, const PipelineShape& shape,
                      const StageCosts& costs = {});

/// A timeline as a picture, with the numbers of micro-batches and a colour for each kind and stage.
std::string draw_as_svg(const PipelineSchedule& schedule, const PipelineTimeline& timeline);

}  // namespace lockstep
