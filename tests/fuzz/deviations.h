#pragma once

// How one rank departs from the program.

#include <optional>
#include <string>
#include <thread>

#include "tests/fuzz/program.h"

namespace lockstep::fuzz {

/// The step as a rank calls it that differs in one thing: operation, dtype, size, shape, root,
/// reduction. None where no difference is promised to be noticed.
std::optional<Step> deviated(const Job& job, Carrier carrier, const Step& step, int group_size);

/// How a rank goes, by the job's `ending`:
/// - leave: it closes its World and ends with 0,
/// - throw: an exception unwinds it,
/// - exit: it ends at once, with 7,
/// - kill, stop: it gets SIGKILL or SIGSTOP,
/// - silence: it calls nothing more,
/// - skip: it leaves one call of the default group out, and goes on.
struct Ending {
  enum class Moment {
    before,  ///< The step's call.
    after,   ///< The call has begun, but for those that block.
    during,  ///< Some time after the call has begun.
  };
  int rank = -1;
  int64_t block = 0;
  size_t step = 0;
  Moment moment = Moment::before;
  int microseconds = 0;  ///< during.
};
Ending make_ending(const Job& job, const std::vector<std::vector<int>>& groups);

/// Ends this rank. Returns for `leave` and `skip` only.
void end_by(const std::string& how);
/// From a thread of its own.
class EndingSoon {
 public:
  EndingSoon(std::string how, int microseconds);
  ~EndingSoon() { thread_.join(); }

 private:
  std::thread thread_;
};

}  // namespace lockstep::fuzz
