#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::shm {

/// Sleeps until `wake_all(word)`, unless `word` no longer holds `expected`. At most `limit`.
/// Returns for other reasons as well: the caller looks again. Works between processes that map the
/// word.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds limit);

/// Wakes everyone that sleeps on `word`.
void wake_all(const std::atomic<uint32_t>& word);

/// Tells the processor that this thread waits in a loop.
inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace lockstep::shm
