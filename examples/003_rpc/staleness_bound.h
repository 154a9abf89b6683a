// Stale synchronous parallel training: bounds by how many steps trainers of the same parameters may
// be apart (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
// Server", NIPS 2013).
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/rpc/rpc.h"

namespace rpc_tutorial {

/// The trainers' clocks, each of which counts the steps of one. They lie with one worker, whose
/// methods all trainers call. Any thread.
class StepClocks {
 public:
  using Clocks = std::map<std::string, int64_t>;
  /// The clock of a trainer that has made its last step.
  static constexpr int64_t kFinished = std::numeric_limits<int64_t>::max();

  static int64_t slowest_of(const Clocks& clocks) {
    int64_t slowest = kFinished;
    for (const auto& [trainer, clock] : clocks) slowest = std::min(slowest, clock);
    return slowest;
  }

  /// `trainers`: they are waited for before they have come.
  explicit StepClocks(const std::vector<std::string>& trainers) {
    for (const auto& trainer : trainers) clocks_[trainer] = 0;
  }

  /// A trainer comes, perhaps late or in a dead one's place. Returns where its clock begins: at the
  /// slowest one's.
  int64_t enter(const std::string& trainer) {
    const std::lock_guard lock(mutex_);
    const int64_t slowest = slowest_of(clocks_);
    return clocks_[trainer] = slowest == kFinished ? 0 : slowest;
  }
  /// Moves the trainer's clock, and waits a moment for the others to reach `needed`. Returns the
  /// clocks that count: those of `lost` workers, as the trainer knows them, do no more.
  Clocks reach(const std::string& trainer, int64_t clock, int64_t needed,
               const std::vector<std::string>& lost) {
    constexpr std::chrono::milliseconds kMoment{100};
    std::unique_lock lock(mutex_);
    clocks_[trainer] = clock;
    for (const auto& worker : lost) clocks_.erase(worker);
    moved_.notify_all();
    moved_.wait_for(lock, kMoment, [&] { return slowest_of(clocks_) >= needed; });
    return clocks_;
  }
  /// Nobody waits for the trainer any more.
  void leave(const std::string& trainer) {
    const std::lock_guard lock(mutex_);
    clocks_.erase(trainer);
    moved_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable moved_;
  Clocks clocks_;
};

inline const auto enter_clocks = lockstep::rpc::method("StepClocks.enter", &StepClocks::enter);
inline const auto reach_clocks = lockstep::rpc::method("StepClocks.reach", &StepClocks::reach);
inline const auto leave_clocks = lockstep::rpc::method("StepClocks.leave", &StepClocks::leave);

/// A trainer's part. Nobody waits for trainers that have died, have left or have finished.
///
/// One thread at a time; not copied or moved. After an exception only its destructor is of use.
class StalenessBound {
 public:
  /// `max_staleness`: by how many steps a trainer may be ahead of the slowest one; 0: all go in
  /// step; none: nobody waits, as with HogWild. `timeout`: a wait fails when nobody makes a step
  /// for so long.
  StalenessBound(const lockstep::rpc::Agent& agent, lockstep::rpc::RRef<StepClocks> clocks,
                 std::optional<int64_t> max_staleness,
                 std::chrono::milliseconds timeout = std::chrono::minutes(1))
      : agent_(agent),
        clocks_(std::move(clocks)),
        max_staleness_(max_staleness),
        timeout_(timeout),
        clock_(clocks_.rpc_sync(enter_clocks, agent.name())) {}
  ~StalenessBound() {
    if (finished_) return;
    try {
      clocks_.rpc_async(leave_clocks, agent_.name());
    } catch (const std::exception&) {  // The agent is gone, of which the others hear.
    }
  }
  StalenessBound(const StalenessBound&) = delete;
  StalenessBound& operator=(const StalenessBound&) = delete;

  /// This trainer has made a step. Waits while that is too far ahead. Returns by how many steps it
  /// is ahead of the slowest one. Throws lockstep::TimeoutError, with those that it waited for.
  int64_t step() {
    ++clock_;
    return clock_ - StepClocks::slowest_of(wait(clock_, clock_ - max_staleness_.value_or(clock_)));
  }
  /// This trainer has made its last step. Waits until all others have: then the parameters are as
  /// they will stay. Throws as `step`.
  void finish() {
    wait(StepClocks::kFinished, StepClocks::kFinished);
    finished_ = true;
  }
  /// The steps made, and those of the slowest one when this trainer came.
  int64_t clock() const { return clock_; }

 private:
  using Clock = std::chrono::steady_clock;

  /// Until all clocks have reached `needed`. Returns them.
  StepClocks::Clocks wait(int64_t clock, int64_t needed) const {
    StepClocks::Clocks before;
    for (auto moved = Clock::now();;) {
      auto now =
          clocks_.rpc_sync(reach_clocks, agent_.name(), clock, needed, agent_.lost_workers());
      if (StepClocks::slowest_of(now) >= needed) return now;
      if (now != before) {
        before = std::move(now);
        moved = Clock::now();
      } else if (Clock::now() - moved > timeout_) {
        throw_stalled(before, needed);
      }
    }
  }
  [[noreturn]] static void throw_stalled(const StepClocks::Clocks& clocks, int64_t needed) {
    std::string behind;
    for (const auto& [trainer, clock] : clocks) {
      if (clock < needed) behind += " '" + trainer + "' at step " + std::to_string(clock);
    }
    throw lockstep::TimeoutError("nobody has made a step for too long; waited for" + behind);
  }

  const lockstep::rpc::Agent& agent_;
  const lockstep::rpc::RRef<StepClocks> clocks_;
  const std::optional<int64_t> max_staleness_;
  const std::chrono::milliseconds timeout_;
  int64_t clock_;
  bool finished_ = false;
};

}  // namespace rpc_tutorial
