#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Finds the rank for which all others wait in each step. Of ranks that do the same work it is one
/// that takes a quarter longer than the median of the others, and a millisecond or more: machines
/// that are a little busy are no news.
class SlowRank {
 public:
  /// Enough to tell it from a rank to which something came between in one step.
  static constexpr int64_t kLeastSteps = 8;

  /// What each rank itself took for the typical one of the last `steps` steps, in seconds, without
  /// waits for others. Gives what there is to say, once per change: the slow rank and what it
  /// costs, or that none is slow any more. Empty: nothing. Each time that none is slow any more,
  /// the next news must hold for twice as many looks: a busy machine changes its mind all the time.
  std::string after(int64_t steps, const std::vector<double>& own_seconds);
  /// The upper one of two in the middle. `values` must not be empty.
  static double median(std::vector<double> values);

 private:
  std::vector<std::vector<double>> seconds_;  ///< By rank, since the last look.
  int64_t steps_ = 0;
  int slow_ = -1;      ///< As told.
  int seen_ = -1;      ///< At the last look.
  int64_t times_ = 0;  ///< In a row.
  int64_t patience_ = 1;
};

/// Lets all ranks stop at the same step although a signal reaches them at different ones. Agreeing
/// costs an all-reduce, so small steps do it every few steps only. That is often enough to agree
/// within a fifth of a second, and at the latest after `kMostSteps`, should the steps become slow.
/// A group of one looks at every step.
class StopAgreement {
 public:
  /// Steps that a signal waits at most. A rank that takes twice as long is named within 20: more
  /// than half of these, and then all.
  static constexpr int64_t kMostSteps = 12;

  StopAgreement(const ProcessGroup& group, c10::Device device);
  /// Every rank calls after each step, with its own signal (0: none). The signal on which all ranks
  /// agreed, the same at the same step on every rank; 0: go on. `own_seconds`: what this rank
  /// itself took for a step in which all ranks do as much; 0: that is not to be compared. A rank
  /// that is slow is told on rank 0.
  int after_step(int signal_number, double own_seconds = 0);
  /// Every rank calls. Agrees at once.
  int now(int signal_number);
  /// What was told last of slow ranks, on rank 0; empty: nothing.
  const std::string& told() const { return told_; }

 private:
  using Clock = std::chrono::steady_clock;
  ProcessGroup group_;
  c10::Device device_;
  int64_t steps_ = 0;
  int64_t interval_ = 1;
  double cost_ = 0;                  ///< Seconds of the last agreement on this rank.
  std::vector<double> own_seconds_;  ///< Of the steps since then.
  bool warm_ = false;                ///< The first steps are behind us, in which ranks differ.
  SlowRank slow_;
  std::string told_;
  Clock::time_point last_;
};

}  // namespace lockstep
