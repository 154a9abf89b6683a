#include "lockstep/comm/shared_memory/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace lockstep::shm {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

void sleep_on(const std::atomic<uint32_t>& word, uint32_t expected,
              std::chrono::nanoseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  time.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  // Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace lockstep::shm
