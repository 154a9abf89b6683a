#pragma once

#include <string>
#include <vector>

namespace lockstep::launch {

/// How an attempt ended: all workers were started once, and all have ended.
struct AttemptEnd {
  bool succeeded = false;
  int signal = 0;  ///< That the user sent while a failure had the workers stopped already; 0: none.
  // Of the root cause of a failure:
  std::string line = {};  ///< "rank 1 (pid 4711) was killed by SIGKILL (signal 9)".
  int exit_code = 0;
  bool executed = true;  ///< False: the program could not be.
  /// The worker says itself that it had not made a step yet. Other programs than ours do not say.
  bool before_first_step = false;
  std::string said = {};  ///< By the worker itself, about its failure.
};

/// A job's attempts so far.
struct Attempts {
  int max_restarts = 0;
  std::vector<std::string> failures = {};  ///< A line for each attempt that has failed.
  /// What the last one said, without its numbers, if it failed before its first step.
  std::string early_failure = {};

  /// The number of the attempt under way, from 0.
  int current() const { return static_cast<int>(failures.size()); }
};

enum class Verdict { done, restart, interrupted, give_up };

struct Decision {
  Verdict verdict;
  Attempts attempts;      ///< With this one.
  std::string hint = {};  ///< Why it is not tried again, or how it could be; may be empty.
};

/// Whether another attempt may end in another way, by this end alone.
bool may_help(const AttemptEnd& end);

/// What to do after an attempt: a function of its arguments alone.
///
/// All start again while --max-restarts allows it, unless it cannot help: the program cannot be
/// executed, exit code 2 tells of wrong arguments, or a worker has failed with the same words twice
/// in a row before its first step.
Decision decide(Attempts attempts, const AttemptEnd& end);

}  // namespace lockstep::launch
