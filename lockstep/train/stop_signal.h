#pragma once

#include <csignal>

namespace lockstep {

/// While one lives, INT, TERM and HUP only set a flag, which the training loop looks at. A second
/// signal of the same kind ends the process at once. Signals that are ignored when it is made
/// (nohup) stay ignored. One at a time in a process, since signal handlers are the process's own.
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
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction before_[3];
};

}  // namespace lockstep
