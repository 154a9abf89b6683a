#pragma once

#include <csignal>
#include <initializer_list>

namespace lockstep {

/// While it lives, these signals come to the thread that made it: whoever starts a process may have
/// blocked them, and it inherits that. Destroyed on the same thread.
class UnblockedSignals {
 public:
  template <class Signals = std::initializer_list<int>>
  explicit UnblockedSignals(const Signals& signals) {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : signals) sigaddset(&set, signal);
    pthread_sigmask(SIG_UNBLOCK, &set, &before_);
  }
  ~UnblockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  UnblockedSignals(const UnblockedSignals&) = delete;
  UnblockedSignals& operator=(const UnblockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace lockstep
