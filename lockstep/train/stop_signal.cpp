#include "lockstep/train/stop_signal.h"

#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "lockstep/base/same_signal.h"

namespace lockstep {
namespace {

/// The first signal and when it came, in one number: handlers may run on several threads at once.
/// A handler has no other way to reach what it sets.
std::atomic<uint64_t> first{0};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

constexpr int kNumberBits = 8;

uint64_t milliseconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

int number_in(uint64_t value) {
  return static_cast<int>(value & ((1U << kNumberBits) - 1));
}

/// Keeps the first; gives what was kept before, 0 for nothing.
uint64_t keep(int number, uint64_t now) {
  uint64_t kept = 0;
  first.compare_exchange_strong(kept, now << kNumberBits | static_cast<uint64_t>(number));
  return kept;
}

void note(int number) {
  const uint64_t now = milliseconds_now();
  const uint64_t kept = keep(number, now);
  if (kept == 0 || number_in(kept) != number) return;
  if (now >= (kept >> kNumberBits) + kSameSignal.count()) ::_exit(128 + number);
}

}  // namespace

StopSignal::StopSignal() {
  bool is_outermost = true;
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    ::sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler == note) is_outermost = false;
  }
  if (is_outermost) first = 0;
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < std::size(kSignals); ++i) {
    const bool stops = kSignals[i] != SIGUSR2;
    action.sa_handler = stops ? note : SIG_IGN;
    const auto before = before_[i].sa_handler;
    if (stops ? before != SIG_IGN : before == SIG_DFL) ::sigaction(kSignals[i], &action, nullptr);
  }
  unblocked_.emplace(kSignals);
}

StopSignal::~StopSignal() {
  unblocked_.reset();
  for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

int StopSignal::received() const {
  return number_in(first.load(std::memory_order_relaxed));
}

void StopSignal::request(int signal_number) {
  keep(signal_number, milliseconds_now());
}

}  // namespace lockstep
