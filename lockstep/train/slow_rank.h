#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

}  // namespace lockstep
