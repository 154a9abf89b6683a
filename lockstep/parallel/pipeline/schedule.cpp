#include "lockstep/parallel/pipeline/schedule.h"

#include <algorithm>
#include <array>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/base/words.h"

namespace lockstep {
namespace {

using Actions = std::vector<PipelineAction>;

constexpr std::array<const char*, 8> kOpNames{"F",      "B",      "I",      "W",
                                              "SEND_F", "RECV_F", "SEND_B", "RECV_B"};

/// All forwards, then all backwards. With several stages a rank: stage after stage.
Actions gpipe(const PipelineSchedule& schedule, int rank) {
  Actions actions;
  const auto add_all = [&](int stage, PipelineOp op) {
    for (int i = 0; i < schedule.num_micro_batches; ++i) actions.push_back({stage, op, i});
  };
  for (int stage = rank; stage < schedule.num_stages; stage += schedule.num_ranks) {
    add_all(stage, PipelineOp::forward);
  }
  for (int stage = schedule.num_stages - schedule.num_ranks + rank; stage >= 0;
       stage -= schedule.num_ranks) {
    add_all(stage, PipelineOp::backward);
  }
  return actions;
}

/// How interleaved schedules go round the stages of a rank: so many micro-batches of a stage, then
/// as many of the next. None when the micro-batches cannot be divided so.
std::optional<int> micro_batches_per_round(int ranks, int micro_batches) {
  const int rounds = std::max(1, micro_batches / ranks);
  if (micro_batches % rounds != 0) return std::nullopt;
  return micro_batches / rounds;
}

/// One forward and one backward in turn, in the order of PyTorch's schedules. A rank runs `per_hop`
/// forwards ahead for each rank after it. With `zero_bubble` backward is I, and each W follows
/// `rank` computations of I later: so all ranks keep as much as the first one.
Actions in_turn(const PipelineSchedule& schedule, int rank, int per_hop, bool zero_bubble) {
  const int stages = schedule.stages_per_rank();
  const int all = stages * schedule.num_micro_batches;
  // With one stage a rank there are no rounds.
  const int per_round =
      micro_batches_per_round(schedule.num_ranks, schedule.num_micro_batches).value_or(1);
  const int warmup =
      std::min(all, (stages - 1) * per_round + per_hop * (schedule.num_ranks - 1 - rank));
  Actions actions;
  std::map<std::pair<PipelineOp, int>, int> done;  // Of each stage, how many there are.
  const auto add = [&](PipelineOp op, int step) {
    const int turn = step / per_round % stages;
    const int stage =
        (op == PipelineOp::forward ? turn : stages - 1 - turn) * schedule.num_ranks + rank;
    actions.push_back({stage, op, done[{op, stage}]++});
  };
  for (int i = 0; i < warmup; ++i) add(PipelineOp::forward, i);
  for (int i = 0; i < all; ++i) {
    if (warmup + i < all) add(PipelineOp::forward, warmup + i);
    add(zero_bubble ? PipelineOp::backward_input : PipelineOp::backward, i);
    if (zero_bubble && i >= rank) add(PipelineOp::backward_weight, i - rank);
  }
  for (int i = std::max(0, all - rank); zero_bubble && i < all; ++i)
    add(PipelineOp::backward_weight, i);
  return actions;
}

struct Kind {
  const char* name;
  int stages_per_rank;  ///< What 0 stands for.
  bool one_stage;       ///< It knows one stage a rank only.
  bool in_rounds;
  int per_hop;  ///< Of in_turn; 0: gpipe.
  bool zero_bubble;
};

constexpr std::array<Kind, 4> kKinds{{{"gpipe", 1, false, false, 0, false},
                                      {"1f1b", 1, true, false, 1, false},
                                      {"interleaved-1f1b", 2, false, true, 2, false},
                                      {"zero-bubble", 1, false, true, 1, true}}};

const Kind& kind_of(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (kind.name == name) return kind;
  }
  throw UsageError(unknown_word("pipeline schedule", name, pipeline_schedule_names()));
}

int stages_per_rank_of(const Kind& kind, const PipelineShape& shape) {
  return shape.stages_per_rank == 0 ? kind.stages_per_rank : shape.stages_per_rank;
}

/// Why the schedule cannot be made; none if it can.
std::optional<UsageError> problem_of(const Kind& kind, const PipelineShape& shape) {
  const std::string where = "pipeline schedule " + std::string(kind.name) + ": ";
  const int stages = stages_per_rank_of(kind, shape);
  for (const auto& [number, what] : {std::pair(shape.num_ranks, "the number of ranks"),
                                     {shape.num_micro_batches, "the number of micro-batches"},
                                     {stages, "the number of stages of a rank"}}) {
    if (number < 1)
      return UsageError(where + what + " is " + std::to_string(number) + "; it must be at least 1");
  }
  if (kind.one_stage && stages > 1)
    return UsageError(where + "it has one stage a rank, not " + std::to_string(stages),
                      "take interleaved-1f1b for several stages a rank");
  if (!kind.in_rounds || micro_batches_per_round(shape.num_ranks, shape.num_micro_batches))
    return std::nullopt;
  return UsageError(where + std::to_string(shape.num_micro_batches) +
                        " micro-batches cannot be divided into " +
                        counted(shape.num_micro_batches / shape.num_ranks, "round"),
                    "take a number of micro-batches that is a multiple of the " +
                        std::to_string(shape.num_ranks) + " ranks of the pipeline");
}

/// The message between an action's stage and the one that is `step` further on in forward; none
/// where there is no such stage or it lies on the same rank.
std::optional<PipelineAction> message(const PipelineSchedule& schedule,
                                      const PipelineAction& action, int step, PipelineOp in_forward,
                                      PipelineOp in_backward) {
  if (!is_compute(action.op) || action.op == PipelineOp::backward_weight) return std::nullopt;
  const bool forward = action.op == PipelineOp::forward;
  const int other = action.stage + (forward ? step : -step);
  if (other < 0 || other >= schedule.num_stages ||
      schedule.rank_of(other) == schedule.rank_of(action.stage)) {
    return std::nullopt;
  }
  return PipelineAction{action.stage, forward ? in_forward : in_backward, action.micro_batch};
}

}  // namespace

bool is_compute(PipelineOp op) {
  return op <= PipelineOp::backward_weight;
}

std::string to_string(const PipelineAction& action) {
  return std::to_string(action.stage) + kOpNames[static_cast<size_t>(action.op)] +
         std::to_string(action.micro_batch);
}

std::vector<std::string> pipeline_schedule_names() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

int default_stages_per_rank(const std::string& name) {
  return kind_of(name).stages_per_rank;
}

bool fits_pipeline_schedule(const std::string& name, const PipelineShape& shape) {
  return !problem_of(kind_of(name), shape);
}

std::optional<PipelineAction> needed_receive(const PipelineSchedule& schedule,
                                             const PipelineAction& action) {
  return message(schedule, action, -1, PipelineOp::recv_forward, PipelineOp::recv_backward);
}

std::optional<PipelineAction> needed_send(const PipelineSchedule& schedule,
                                          const PipelineAction& action) {
  return message(schedule, action, 1, PipelineOp::send_forward, PipelineOp::send_backward);
}

void add_communication(PipelineSchedule& schedule) {
  for (auto& actions : schedule.actions) {
    const std::vector<PipelineAction> computations = std::move(actions);
    actions.clear();
    const auto begin_receive = [&](size_t at) {
      if (at >= computations.size()) return;
      if (const auto receive = needed_receive(schedule, computations[at])) {
        actions.push_back(*receive);
      }
    };
    begin_receive(0);
    for (size_t at = 0; at < computations.size(); ++at) {
      begin_receive(at + 1);
      actions.push_back(computations[at]);
      if (const auto send = needed_send(schedule, computations[at])) actions.push_back(*send);
    }
  }
}

PipelineSchedule make_pipeline_schedule(const std::string& name, const PipelineShape& shape) {
  const Kind& kind = kind_of(name);
  if (const auto problem = problem_of(kind, shape)) throw *problem;
  PipelineSchedule schedule;
  schedule.name = name;
  schedule.num_ranks = shape.num_ranks;
  schedule.num_stages = shape.num_ranks * stages_per_rank_of(kind, shape);
  schedule.num_micro_batches = shape.num_micro_batches;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    schedule.actions.push_back(kind.per_hop == 0
                                   ? gpipe(schedule, rank)
                                   : in_turn(schedule, rank, kind.per_hop, kind.zero_bubble));
  }
  add_communication(schedule);
  return schedule;
}

}  // namespace lockstep
