#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep {

/// Finds the rank for which all others wait. Of ranks that do the same work it is one that takes a
/// quarter longer than the median of the others, and a millisecond or more. A busy machine slows
/// now this rank, now that one: only what lasts is news.
class SlowRank {
 public:
  /// Enough to tell it from a rank to which something came between in one step.
  static constexpr int64_t kLeastSteps = 8;
  /// Of the time of all steps so far, for which a rank must have been slow.
  static constexpr double kLeastShare = 0.05;

  /// A rank must have been slow for so long. What else a machine does mostly takes less than 10 s.
  explicit SlowRank(double least_seconds = 10) : least_seconds_(least_seconds) {}

  /// What each rank itself took for the typical one of the last `steps` steps, in seconds, without
  /// waits for others. `seconds`: what these steps took together. Gives what there is to say, once
  /// for each rank: that it is slow, and what that costs. Empty: nothing.
  std::string after(int64_t steps, double seconds, const std::vector<double>& own_seconds);
  /// The upper one of two in the middle. `values` must not be empty.
  static double median(std::vector<double> values);

 private:
  double least_seconds_;
  std::vector<std::vector<double>> own_seconds_;  ///< By rank, since the last look.
  int64_t steps_ = 0;                             ///< Since then, and their time.
  double seconds_ = 0;
  double all_seconds_ = 0;
  /// By rank: for how long it was slow, less the time in which it was not.
  std::vector<double> slow_seconds_;
  std::set<size_t> told_;
};

/// Lets all ranks stop at the same step although a signal reaches them at different ones. Agreeing
/// costs an all-reduce, so small steps do it every few steps only. That is often enough to agree
/// within a fifth of a second, and at the latest after `kMostSteps`, should the steps become slow.
/// A group of one looks at every step.
class StopAgreement {
 public:
  /// Steps that a signal waits at most.
  static constexpr int64_t kMostSteps = 12;

  StopAgreement(const ProcessGroup& group, c10::Device device, SlowRank slow = SlowRank());
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
