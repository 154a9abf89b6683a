#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/base/failure.h"
#include "lockstep/comm/shared_memory/memory.h"
#include "lockstep/comm/shared_memory/step_barrier.h"

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

struct SegmentOptions : MeetingOptions {
  /// Of each of a rank's three slots. Smaller means more steps. Larger means that a step's data
  /// leaves the cache before it is read. Of 64 to 512 KiB this was fastest, measured with 512 KiB
  /// of level-2 cache per core.
  size_t slot_bytes = 256 << 10;
  /// Of the ring for messages from one rank to another. Only those that are used take memory.
  size_t message_bytes = 64 << 10;
};

/// The shared memory of a group of processes on one host, mapped. Its pages are reserved when it is
/// made, so that a lack of memory is an error here and no SIGBUS later. Pages for messages are
/// reserved as they are used.
class Segment {
 public:
  /// Blocks until rank 0 has been met by all. Throws what SharedMemory throws, and CommError for
  /// ranks of other versions.
  Segment(const SegmentOptions& options, const Meeting& meeting);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  SegmentHeader& header() const { return *header_; }
  RankRecord& record(int rank) const;
  /// Tells the others that this rank calls nothing any more, after `rounds` of its program's loop.
  void leave(int64_t rounds = 0) noexcept;
  /// For the others, if this rank leaves over it: why its meeting failed, or the end of another
  /// rank that made one of its messages fail. The first counts.
  void note_cause(const Failure& cause) noexcept;
  /// Whether the rank's process has ended. Never blocks.
  bool has_ended(int rank) const;
  size_t slot_bytes() const { return slot_bytes_; }
  /// The slot that `rank` writes in `step`. The data follows the header.
  std::byte* slot(int rank, uint64_t step) const {
    const auto index = static_cast<size_t>(rank) * kSlots + step % kSlots;
    return slots_ + index * (kSlotHeader + slot_bytes_);
  }
  size_t message_bytes() const { return message_bytes_; }
  /// Zeroed memory of `message_bytes` for what `from` sends to `to`. There is more at `size()`, for
  /// what all others tell `from`.
  std::byte* messages(int from, int to) const {
    const auto index =
        static_cast<size_t>(from) * static_cast<size_t>(size_ + 1) + static_cast<size_t>(to);
    return messages_ + index * message_bytes_;
  }

 private:
  int rank_;
  int size_;
  size_t slot_bytes_;
  size_t message_bytes_;
  SharedMemory memory_;
  SegmentHeader* header_;
  std::byte* slots_;
  std::byte* messages_;
};

}  // namespace lockstep::shm
