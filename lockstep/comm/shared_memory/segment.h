#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "lockstep/base/failure.h"
#include "lockstep/comm/shared_memory/step_barrier.h"

// What lies in the shared memory of a group of processes on one host.

namespace lockstep::shm {

/// What a rank publishes with the first step of a call, in front of its data. Then all ranks know
/// whether all make the same call. It costs only a cache line that is read anyway.
struct SlotHeader {
  uint64_t call = 0;  ///< A hash of what the ranks must agree on.
};

/// Memory that is written by one rank in one step and read by all in the next. Small data lies in
/// the header's own cache line.
inline constexpr size_t kSlotHeader = 64;
inline constexpr size_t kInlineBytes = kSlotHeader - sizeof(SlotHeader);
inline constexpr int kSlots = 3;  ///< See StepBarrier, 5.

/// A failure in shared memory, cut to what fits, and how it is read there.
template <size_t N>
void store_failure(std::array<char, N>& target, const Failure& failure) {
  encode(failure, N).copy(target.data(), N);
}
template <size_t N>
std::optional<Failure> read_failure(const std::array<char, N>& source) {
  return decode_failure({source.data(), N});
}

enum class RankState : uint32_t { absent, joined, left };

struct alignas(64) RankRecord {
  std::atomic<RankState> state;
  std::atomic<uint32_t> caused;  ///< 1 once `cause` is written.
  std::atomic<uint64_t> calls;   ///< How many collectives it has called.
  std::atomic<uint64_t> step;    ///< The last step at which it has arrived.
  std::atomic<int64_t> rounds;   ///< Of its program's loop, written when it leaves.
  std::array<char, 232> identity;
  cpu_set_t processors;  ///< On which it may run. Empty: not known, as on more than 1024.
  std::array<char, 512> cause;
};

/// Why the group is of no more use: the first failure, encoded, by the rank that found it first.
struct alignas(64) FailureBoard {
  enum State : uint32_t { empty, writing, written };
  std::atomic<uint32_t> state;
  std::array<char, 1980> failure;
};

struct alignas(64) SegmentHeader {
  std::array<char, 8> version;
  StepBarrier barrier;
  FailureBoard board;
};

}  // namespace lockstep::shm
