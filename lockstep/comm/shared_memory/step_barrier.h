#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep::shm {

/// How the ranks of a group keep step: the whole synchronisation of the collectives, in one cache
/// line of shared memory. All zero at the start.
///
/// The group runs through steps 1, 2, 3, ... In each step every rank writes what it has to give
/// into memory of its own and calls `arrive`. It waits until all have arrived, and then reads the
/// others' memory. `count` is the number of arrivals so far, modulo 2^32.
///
/// Why it is right (tests/models/step_barrier.pml checks the same with spin):
///
/// 1. Reached means all are there. A rank arrives at step s + 1 only after it has seen step s
///    reached, so at most one step is open. The count lies in [N(s-1), Ns] until the last rank
///    arrives at s. It lies in [Ns, N(s+1)) for as long as some rank has yet to see that. N < 2^16,
///    so the sign of the 32-bit difference count - Ns tells the two apart.
/// 2. What was written before arriving is visible. `arrive` is a read-modify-write with release
///    order. All arrivals form one release sequence, and a waiter reads the count with acquire.
/// 3. No wake-up is lost. The last to arrive first adds to `count` (A), then reads `sleepers` (B).
///    A waiter first adds to `sleepers` (C), then reads `count` (D). Then it sleeps if `count`
///    still holds what D read (the kernel compares under a lock of its own). All four are
///    sequentially consistent. If D does not see A, then D precedes A, so C precedes B, and the
///    last one to arrive wakes. If the wake comes before the sleep, `count` has changed since D,
///    and the sleep returns at once. Only the last to arrive need wake, since nobody waits for
///    less.
/// 4. A rank may die anywhere. Before A: the step is not reached. Its waiters find out, as they
///    sleep for a slice at a time and look in between which ranks are alive. Between A and the
///    wake: the waiters see the step reached when their slice ends. Asleep: `sleepers` stays too
///    high, and the last to arrive makes a system call that wakes nobody.
/// 5. Reuse of memory. The others read what a rank wrote for step s before they arrive at s + 1.
/// Where
///    an algorithm says so, they read it before s + 2. A rank that has seen step s + 2 reached may
///    overwrite it for s + 3: three slots in turn.
struct alignas(64) StepBarrier {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> sleepers;

  /// Arrives at `step` as one of `size` ranks. Wakes the others if this was the last.
  void arrive(uint64_t step, int size);
  bool reached(uint64_t step, int size) const {
    const auto target = static_cast<uint32_t>(step * static_cast<uint64_t>(size));
    return static_cast<int32_t>(count.load(std::memory_order_acquire) - target) >= 0;
  }
  /// Looks for at most `budget`, without sleeping. True when the step was reached.
  bool spin(uint64_t step, int size, std::chrono::nanoseconds budget) const;
  /// Sleeps until the step is reached, at most `slice`. May return earlier for no reason.
  void sleep(uint64_t step, int size, std::chrono::nanoseconds slice);
};
static_assert(sizeof(StepBarrier) == 64);

}  // namespace lockstep::shm
