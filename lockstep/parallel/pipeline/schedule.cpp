#include "lockstep/parallel/pipeline/schedule.h"

#include <algorithm>
#include <array>

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
class InTurn {
 public:
  InTurn(const PipelineSchedule& schedule, int rank, int per_hop, bool zero_bubble)
      : schedule_(schedule),
        rank_(rank),
        per_hop_(per_hop),
        zero_bubble_(zero_bubble),
        // With one stage a rank there are no rounds.
        per_round_(
            micro_batches_per_round(schedule.num_ranks, schedule.num_micro_batches).value_or(1)),
        forwards_(schedule.num_stages),
        backwards_(schedule.num_stages) {}

  Actions make() {
    const int stages = schedule_.stages_per_rank();
    const int all = stages * schedule_.num_micro_batches;
    const int warmup =
        std::min(all, (stages - 1) * per_round_ + per_hop_ * (schedule_.num_ranks - 1 - rank_));
    for (int i = 0; i < warmup; ++i) add_forward(i);
    for (int i = 0; i < all; ++i) {
      if (warmup + i < all) add_forward(warmup + i);
      add_backward(i);
      if (zero_bubble_ && i >= rank_) add_weight();
    }
    while (zero_bubble_ && weights_ < waiting_.size()) add_weight();
    return std::move(actions_);
  }

 private:
  int local(int step) const { return step / per_round_ % schedule_.stages_per_rank(); }
  int stage(int local) const { return local * schedule_.num_ranks + rank_; }

  void add_forward(int step) {
    const int at = stage(local(step));
    actions_.push_back({at, PipelineOp::forward, forwards_[at]++});
  }
  void add_backward(int step) {
    const int at = stage(schedule_.stages_per_rank() - 1 - local(step));
    const PipelineOp op = zero_bubble_ ? PipelineOp::backward_input : PipelineOp::backward;
    actions_.push_back({at, op, backwards_[at]++});
    waiting_.push_back(actions_.back());
  }
  void add_weight() {
    const PipelineAction& input = waiting_[weights_++];
    actions_.push_back({input.stage, PipelineOp::backward_weight, input.micro_batch});
  }

  const PipelineSchedule& schedule_;
  const int rank_;
  const int per_hop_;
  const bool zero_bubble_;
  const int per_round_;
  std::vector<int> forwards_;  ///< Of each stage, how many there are.
  std::vector<int> backwards_;
  Actions waiting_;  ///< All I, of which the first `weights_` have their W.
  size_t weights_ = 0;
  Actions actions_;
};

struct Kind {
  const char* name;
  int stages_per_rank;  ///< What 0 stands for.
  bool one_stage;       ///< It knows one stage a rank only.
  bool in_rounds;
  Actions (*make)(const PipelineSchedule& schedule, int rank);
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"gpipe", 1, false, false, gpipe},
      {"1f1b", 1, true, false,
       [](const PipelineSchedule& schedule, int rank) {
         return InTurn(schedule, rank, /*per_hop=*/1, /*zero_bubble=*/false).make();
       }},
      {"interleaved-1f1b", 2, false, true,
       [](const PipelineSchedule& schedule, int rank) {
         return InTurn(schedule, rank, /*per_hop=*/2, /*zero_bubble=*/false).make();
       }},
      {"zero-bubble", 1, false, true,
       [](const PipelineSchedule& schedule, int rank) {
         return InTurn(schedule, rank, /*per_hop=*/1, /*zero_bubble=*/true).make();
       }},
  };
  return all;
}

const Kind& kind_of(const std::string& name) {
  for (const Kind& kind : kinds()) {
    if (kind.name == name) return kind;
  }
  throw UsageError(unknown_word("pipeline schedule", name, pipeline_schedule_names()));
}

int stages_per_rank_of(const Kind& kind, const PipelineShape& shape) {
  return shape.stages_per_rank == 0 ? kind.stages_per_rank : shape.stages_per_rank;
}

/// Why the schedule cannot be made; empty if it can.
struct Problem {
  std::string what;
  std::string hint = {};
};

Problem problem_of(const Kind& kind, const PipelineShape& shape) {
  const int stages = stages_per_rank_of(kind, shape);
  for (const auto& [number, what] : {std::pair(shape.num_ranks, "the number of ranks"),
                                     {shape.num_micro_batches, "the number of micro-batches"},
                                     {stages, "the number of stages of a rank"}}) {
    if (number < 1)
      return {std::string(what) + " is " + std::to_string(number) + "; it must be at least 1"};
  }
  if (kind.one_stage && stages > 1)
    return {"it has one stage a rank, not " + std::to_string(stages),
            "take interleaved-1f1b for several stages a rank"};
  if (!kind.in_rounds || micro_batches_per_round(shape.num_ranks, shape.num_micro_batches))
    return {};
  return {std::to_string(shape.num_micro_batches) + " micro-batches cannot be divided into " +
              counted(shape.num_micro_batches / shape.num_ranks, "round"),
          "take a number of micro-batches that is a multiple of the " +
              std::to_string(shape.num_ranks) + " ranks of the pipeline"};
}

/// The message between an action's stage and the one `step` further on; none where there is no such
/// stage or it lies on the same rank.
std::optional<PipelineAction> message(const PipelineSchedule& schedule,
                                      const PipelineAction& action, int step, PipelineOp op) {
  const int other = action.stage + step;
  if (other < 0 || other >= schedule.num_stages ||
      schedule.rank_of(other) == schedule.rank_of(action.stage)) {
    return std::nullopt;
  }
  return PipelineAction{action.stage, op, action.micro_batch};
}

bool gives_input_gradient(PipelineOp op) {
  return op == PipelineOp::backward || op == PipelineOp::backward_input;
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
  for (const Kind& kind : kinds()) names.emplace_back(kind.name);
  return names;
}

int default_stages_per_rank(const std::string& name) {
  return kind_of(name).stages_per_rank;
}

bool fits_pipeline_schedule(const std::string& name, const PipelineShape& shape) {
  return problem_of(kind_of(name), shape).what.empty();
}

std::optional<PipelineAction> needed_receive(const PipelineSchedule& schedule,
                                             const PipelineAction& action) {
  if (action.op == PipelineOp::forward) {
    return message(schedule, action, -1, PipelineOp::recv_forward);
  }
  if (!gives_input_gradient(action.op)) return std::nullopt;
  return message(schedule, action, 1, PipelineOp::recv_backward);
}

std::optional<PipelineAction> needed_send(const PipelineSchedule& schedule,
                                          const PipelineAction& action) {
  if (action.op == PipelineOp::forward) {
    return message(schedule, action, 1, PipelineOp::send_forward);
  }
  if (!gives_input_gradient(action.op)) return std::nullopt;
  return message(schedule, action, -1, PipelineOp::send_backward);
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
  const Problem problem = problem_of(kind, shape);
  if (!problem.what.empty())
    throw UsageError("pipeline schedule " + name + ": " + problem.what, problem.hint);
  PipelineSchedule schedule;
  schedule.name = name;
  schedule.num_ranks = shape.num_ranks;
  schedule.num_stages = shape.num_ranks * stages_per_rank_of(kind, shape);
  schedule.num_micro_batches = shape.num_micro_batches;
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    schedule.actions.push_back(kind.make(schedule, rank));
  }
  add_communication(schedule);
  return schedule;
}

}  // namespace lockstep
