#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/base/same_signal.h"

namespace lockstep::launch {

/// How one worker ended.
struct WorkerEnd {
  int wait_status = 0;       ///< As waitpid gives it; see also `start_errno`.
  int start_errno = 0;       ///< Not 0: the program could not be executed at all.
  bool after_stop = false;   ///< We had already told the workers to stop.
  bool consequence = false;  ///< It says itself that a peer was lost: another one is the cause.
  std::optional<int64_t> said_at;  ///< Seconds since 1970 of its own error report, if it wrote one.
  int64_t ended_at = 0;            ///< Seconds since 1970.
  int order = 0;                   ///< Its place in the order in which the workers ended.

  bool succeeded() const { return wait_status == 0 && start_errno == 0; }
  /// By USR1, with or without a handler of its own: by that schedulers tell of a preemption.
  bool left_by_usr1() const;
};

/// The workers of one job and what to do at each event. It makes no system call, so that every
/// sequence of events can be tried in a test. Each event returns the signal to send to all workers
/// that still live, 0 for none. Time is an argument.
class Job {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Options {
    /// Between TERM and KILL when a worker failed. All must be over within a second.
    std::chrono::milliseconds grace{800};
    /// Between a signal that the user sent, which is forwarded, and KILL. It is long enough to save
    /// a checkpoint. torchrun waits as long.
    std::chrono::milliseconds signal_grace{30'000};
    /// A worker that ended because it lost a peer is followed by that peer's own end, here or on
    /// another host. That end is the cause, and the peer should get to say so before it is told to
    /// stop.
    std::chrono::milliseconds settle{1000};
    /// A second signal kills at once, unless it comes this soon.
    std::chrono::milliseconds same_signal = kSameSignal;
  };

  enum class Ending { success, failure, interrupted, output_closed };

  Job(int workers, Options options);

  /// The end of worker `index`, 0 to workers-1. `end`'s after_stop and order are filled in here.
  /// One that was ended by USR1, or exits with code 138 (128 + USR1), has saved what it wants to
  /// save and leaves: the job counts as interrupted by USR1, not as failed.
  int ended(int index, WorkerEnd end, Time now);
  /// Worker `index` has failed, but the job goes on without it and needs nobody in its place.
  void dropped(int index);
  /// INT, TERM, HUP, ... sent to us.
  int signalled(int signal, Time now);
  /// The workers leave by USR1, as one of them or another host has: those that still live get TERM.
  int left(Time now);
  /// Nobody reads our output any more.
  int output_closed(Time now);
  /// Our supervisor is gone, or something else that leaves no choice but to end.
  int failed(Time now);
  /// The time `deadline` named has come.
  int tick(Time now);
  /// When `tick` wants to be called; none: not at all.
  std::optional<Time> deadline() const { return deadline_; }

  /// Nothing has failed or was signalled so far.
  bool running() const { return phase_ == Phase::running; }
  bool all_ended() const { return living_ == 0; }
  /// What it comes to. Valid when all have ended.
  Ending ending() const;
  /// The signal of `Ending::interrupted`.
  int signal() const { return signal_; }
  /// One that came when a failure had the workers stopped already. 0: none.
  int late_signal() const { return late_signal_; }
  /// Which worker's failure is the cause. None when none failed of itself.
  std::optional<int> root_cause() const;
  const std::optional<WorkerEnd>& end_of(int index) const { return ends_.at(index); }

 private:
  enum class Phase { running, settling, stopping, interrupting, killing };
  int stop(Time now);
  int kill();

  Options options_;
  std::vector<std::optional<WorkerEnd>> ends_;
  int living_;
  Phase phase_ = Phase::running;
  std::optional<Time> deadline_;
  std::optional<Time> signalled_at_;
  int signal_ = 0;
  int late_signal_ = 0;
  bool failed_ = false;
  bool output_closed_ = false;
};

}  // namespace lockstep::launch
