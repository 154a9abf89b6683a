#pragma once

// For tests: the text of an action, and what is wrong with a schedule.

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep::test {

/// Reads "2F0" or "1SEND_B3". None for any other text.
inline std::optional<PipelineAction> parse_pipeline_action(const std::string& text) {
  constexpr std::array<const char*, 8> kOpNames{"F",      "B",      "I",      "W",
                                                "SEND_F", "RECV_F", "SEND_B", "RECV_B"};
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto begin = std::find_if_not(text.begin(), text.end(), is_digit);
  const auto end = std::find_if(begin, text.end(), is_digit);
  const auto op = std::find(kOpNames.begin(), kOpNames.end(), std::string(begin, end));
  const auto stage = parse_int(std::string(text.begin(), begin));
  const auto micro_batch = parse_int(std::string(end, text.end()));
  if (op == kOpNames.end() || !stage || !micro_batch) return std::nullopt;
  return PipelineAction{static_cast<int>(*stage), static_cast<PipelineOp>(op - kOpNames.begin()),
                        static_cast<int>(*micro_batch)};
}

using Op = PipelineOp;

inline std::string on_rank(int rank, const PipelineAction& action) {
  return "rank " + std::to_string(rank) + ": " + to_string(action);
}

/// The numbers and the place of each action.
inline std::string fault_of_places(const PipelineSchedule& schedule) {
  if (schedule.num_ranks < 1 || schedule.num_micro_batches < 1 || schedule.num_stages < 1 ||
      schedule.num_stages % schedule.num_ranks != 0) {
    return "it has " + std::to_string(schedule.num_stages) + " stages for " +
           std::to_string(schedule.num_ranks) + " ranks, which does not divide";
  }
  if (schedule.actions.size() != static_cast<size_t>(schedule.num_ranks)) {
    return "it has lists for " + std::to_string(schedule.actions.size()) + " ranks, not " +
           std::to_string(schedule.num_ranks);
  }
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    std::set<PipelineAction> seen;
    for (const PipelineAction& action : schedule.actions[static_cast<size_t>(rank)]) {
      if (action.stage < 0 || action.stage >= schedule.num_stages || action.micro_batch < 0 ||
          action.micro_batch >= schedule.num_micro_batches) {
        return on_rank(rank, action) + " names a stage or micro-batch that is not there";
      }
      if (schedule.rank_of(action.stage) != rank) {
        return on_rank(rank, action) + " is of a stage of rank " +
               std::to_string(schedule.rank_of(action.stage));
      }
      if (!seen.insert(action).second) return on_rank(rank, action) + " comes twice";
    }
  }
  return {};
}

/// What a rank's own list must hold, and in which order.
class RankCheck {
 public:
  RankCheck(const PipelineSchedule& schedule, int rank)
      : schedule_(schedule), rank_(rank), actions_(schedule.actions[static_cast<size_t>(rank)]) {
    for (size_t i = 0; i < actions_.size(); ++i) at_[actions_[i]] = i;
  }

  std::string fault() const {
    for (int stage = rank_; stage < schedule_.num_stages; stage += schedule_.num_ranks) {
      for (int i = 0; i < schedule_.num_micro_batches; ++i) {
        if (auto text = fault_of_micro_batch(stage, i); !text.empty()) return text;
      }
    }
    for (const PipelineAction& action : actions_) {
      if (auto text = fault_of_message(action); !text.empty()) return text;
    }
    return fault_of_order();
  }

 private:
  bool has(const PipelineAction& action) const { return at_.contains(action); }
  bool ordered(const PipelineAction& first, const PipelineAction& second) const {
    return has(first) && has(second) && at_.at(first) < at_.at(second);
  }
  std::string wants(const PipelineAction& action, const std::string& what) const {
    return on_rank(rank_, action) + " " + what;
  }

  std::string fault_of_micro_batch(int stage, int i) const {
    const PipelineAction forward{stage, Op::forward, i}, whole{stage, Op::backward, i},
        input{stage, Op::backward_input, i}, weight{stage, Op::backward_weight, i};
    if (!has(forward)) return wants(forward, "is missing");
    if (has(whole) && (has(input) || has(weight))) {
      return wants(whole, "comes beside " + to_string(has(input) ? input : weight));
    }
    if (has(whole)) {
      return ordered(forward, whole) ? "" : wants(whole, "comes before " + to_string(forward));
    }
    if (!has(input) && !has(weight)) return wants(whole, "is missing");
    if (!has(input)) return wants(input, "is missing");
    if (!has(weight)) return wants(weight, "is missing");
    if (!ordered(forward, input)) return wants(input, "comes before " + to_string(forward));
    return ordered(input, weight) ? "" : wants(weight, "comes before " + to_string(input));
  }

  std::string fault_of_message(const PipelineAction& action) const {
    if (is_compute(action.op)) {
      const auto receive = needed_receive(schedule_, action);
      if (receive && !ordered(*receive, action)) {
        return wants(action, "needs " + to_string(*receive) + " before it");
      }
      const auto send = needed_send(schedule_, action);
      if (send && !ordered(action, *send)) {
        return wants(action, "needs " + to_string(*send) + " after it");
      }
      return {};
    }
    const auto belongs = [&](const PipelineAction& computation) {
      return needed_receive(schedule_, computation) == action ||
             needed_send(schedule_, computation) == action;
    };
    return std::any_of(actions_.begin(), actions_.end(), belongs)
               ? ""
               : wants(action, "belongs to no computation");
  }

  /// Gradients add up in the order of micro-batches: so the sums have the bits of one process.
  std::string fault_of_order() const {
    std::map<std::pair<int, Op>, int> last;
    for (const PipelineAction& action : actions_) {
      const auto [before, is_first] = last.try_emplace({action.stage, action.op}, -1);
      if (action.micro_batch < before->second) {
        return wants(action, "comes after micro-batch " + std::to_string(before->second));
      }
      before->second = action.micro_batch;
    }
    return {};
  }

  const PipelineSchedule& schedule_;
  const int rank_;
  const std::vector<PipelineAction>& actions_;
  std::map<PipelineAction, size_t> at_;
};

/// Lets every rank go on as far as it can until none can.
inline std::string deadlock_of(const PipelineSchedule& schedule) {
  try {
    (void)simulate_pipeline(schedule, {{StageCosts{}}});
    return {};
  } catch (const UsageError& error) {
    return std::string("a deadlock: ") + error.what();
  }
}

/// The fault of a schedule; empty if it is valid. It finds:
/// - a computation that is missing, comes twice, or is on another stage's rank
/// - B, I or W before what it needs; micro-batches of a stage out of their order
/// - a send or receive without its other half, or begun too early or too late
/// - a deadlock
///
/// This is a proof: time affects only the order in which ranks make progress. If the schedule ends
/// in one such order, it ends in all, because no action can take away what another one waits for.
inline std::string fault_of(const PipelineSchedule& schedule) {
  if (auto fault = fault_of_places(schedule); !fault.empty()) return fault;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    if (auto fault = RankCheck(schedule, rank).fault(); !fault.empty()) return fault;
  }
  return deadlock_of(schedule);
}

}  // namespace lockstep::test
