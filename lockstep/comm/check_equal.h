#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "lockstep/base/state_dict.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::detail {

/// What ranks must have alike.
struct Compared {
  std::string what;                             ///< Who compares: "GradientAverager".
  int64_t steps = -1;                           ///< That this rank has made; -1: not counted.
  StateDict tensors = {};                       ///< In the same order on all ranks.
  std::map<std::string, double> settings = {};  ///< Of an optimizer, by name.
};

/// After which of their steps ranks compare what must be alike: the 2nd, 10th, 100th, and so on.
/// Hashing all weights so seldom costs too little to be measured.
bool is_compared_after(int64_t steps);

/// Throws MismatchError on every rank unless all have the same. `failure()` has the ranks that
/// differ from the others, and as `detail` the name of the first tensor or setting that differs.
/// Differences of floating-point numbers no greater than rounding by other processors or numbers of
/// threads (1e-5 of a tensor's norm) are a warning of rank 0. A collective.
void check_equal(const Compared& mine, const ProcessGroup& group);

}  // namespace lockstep::detail
