#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {
namespace {

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

}  // namespace lockstep
