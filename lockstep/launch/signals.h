#pragma once

#include <csignal>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/unblocked_signals.h"

namespace lockstep::launch {

/// Where they were ignored at our start, they are ignored here and in the workers: by nohup, and in
/// background jobs of a shell without job control. Any other is handled all the same.
constexpr int kStayIgnored[] = {SIGHUP, SIGINT, SIGQUIT};

/// What these mean is between a worker and who sends them: Slurm sends one before it ends a job.
inline bool is_message(int signal) {
  return signal == SIGUSR1 || signal == SIGUSR2;
}

/// While it lives, the given signals do not end this process but arrive here, and SIGPIPE is
/// ignored. Those of `kStayIgnored` that were ignored stay so. Those that are blocked on the
/// calling thread come there all the same. What was before is put back at destruction. By handlers
/// and a pipe and not by signalfd, because a signal to a program with threads goes to any thread
/// that has not blocked it. One at a time in a process; the constructor throws Error when there is
/// one already.
class SignalCatcher {
 public:
  explicit SignalCatcher(const std::vector<int>& signals);
  ~SignalCatcher();
  SignalCatcher(const SignalCatcher&) = delete;
  SignalCatcher& operator=(const SignalCatcher&) = delete;

  /// Readable when `next` has something.
  int fd() const { return read_.get(); }
  /// The next signal that came. None: none now.
  std::optional<int> next();

 private:
  UniqueFd read_;
  UniqueFd write_;
  std::vector<std::pair<int, struct sigaction>> before_;
  std::optional<UnblockedSignals> unblocked_;  ///< Last: none comes without its handler.
};

}  // namespace lockstep::launch
