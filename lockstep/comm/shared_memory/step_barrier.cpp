#include "lockstep/comm/shared_memory/step_barrier.h"

#include "lockstep/comm/shared_memory/futex.h"

namespace lockstep::shm {

void StepBarrier::arrive(uint64_t step, int size) {
  const auto target = static_cast<uint32_t>(step * static_cast<uint64_t>(size));
  const uint32_t now = count.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (now == target && sleepers.load(std::memory_order_seq_cst) != 0) wake_all(count);
}

bool StepBarrier::spin(uint64_t step, int size, std::chrono::nanoseconds budget) const {
  using Clock = std::chrono::steady_clock;
  constexpr int kLooksPerTime = 32;
  if (reached(step, size)) return true;
  if (budget.count() <= 0) return false;
  const auto end = Clock::now() + budget;
  do {
    for (int look = 0; look < kLooksPerTime; ++look) {
      if (reached(step, size)) return true;
      spin_pause();
    }
  } while (Clock::now() < end);
  return false;
}

void StepBarrier::sleep(uint64_t step, int size, std::chrono::nanoseconds slice) {
  const auto target = static_cast<uint32_t>(step * static_cast<uint64_t>(size));
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = count.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(seen - target) < 0) sleep_on(count, seen, slice);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace lockstep::shm
