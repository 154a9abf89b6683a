#pragma once

#include <csignal>
#include <iterator>
#include <optional>

#include "lockstep/base/unblocked_signals.h"

namespace lockstep {

/// While one lives, INT, TERM, HUP, QUIT and USR1, by which Slurm tells of the end of a job's time,
/// only set a flag, which the training loop looks at. A second signal of the same kind ends the
/// process at once, unless it comes so soon that it is the first once more (kSameSignal). Signals
/// that are ignored when it is made (nohup, background jobs) stay ignored, those that are blocked
/// on its thread come. USR2, which a launcher forwards, is ignored where nothing handles it. Signal
/// handlers are the process's own: of several at a time each lives within the one before, which
/// tells of the same.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// The number of the first signal that came; 0: none.
  int received() const;
  /// As if a signal had come: for a standard output that is closed (SIGPIPE).
  static void request(int signal_number);

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
  struct sigaction before_[std::size(kSignals)];
  std::optional<UnblockedSignals> unblocked_;  ///< Last: none comes without its handler.
};

}  // namespace lockstep
