#include "lockstep/train/stop_signal.h"

#include <unistd.h>

#include <atomic>

namespace lockstep {
namespace {

// A handler has no other way to reach what it sets.
std::atomic<int> first_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);

void note(int number) {
  int none = 0;
  if (!first_signal.compare_exchange_strong(none, number) && none == number) ::_exit(128 + number);
}

}  // namespace

StopSignal::StopSignal() {
  first_signal = 0;
  for (int i = 0; i < 3; ++i) {
    struct sigaction action {};
    action.sa_handler = note;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignal::~StopSignal() {
  for (int i = 0; i < 3; ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int StopSignal::received() const {
  return first_signal.load(std::memory_order_relaxed);
}

void StopSignal::request(int signal_number) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal_number);
}

}  // namespace lockstep
