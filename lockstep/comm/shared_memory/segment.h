#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/base/failure.h"
#include "lockstep/base/unforked_fd.h"
#include "lockstep/comm/shared_memory/memory.h"
#include "lockstep/comm/shared_memory/processors.h"
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

/// A text in shared memory, cut to what fits.
template <size_t N>
void store_text(std::array<char, N>& target, const std::string& text) {
  target[text.copy(target.data(), N - 1)] = '\0';
}

enum class RankState : uint32_t { absent, joined, left };

struct alignas(64) RankRecord {
  std::atomic<RankState> state;
  std::atomic<uint32_t> caused;  ///< 1 once `cause` is written.
  std::atomic<uint32_t> locked;  ///< 1 once the rank holds its lock (see Segment::has_ended).
  std::atomic<uint32_t> bound;   ///< 1 once `processors`, on which it may run, is written.
  std::atomic<uint64_t> calls;   ///< How many collectives it has called.
  std::atomic<uint64_t> step;    ///< The last step at which it has arrived.
  std::atomic<int64_t> rounds;   ///< Of its program's loop, written when it leaves.
  std::array<char, 232> identity;
  ProcessorSet processors;
  /// The end of another rank that made the first of this rank's messages fail. If this rank ends
  /// over it, the others learn why.
  std::array<char, 512> cause;
};

/// Why the group is of no more use: the first failure, encoded, by the rank that found it first.
struct alignas(64) FailureBoard {
  enum State : uint32_t { empty, writing, written };
  std::atomic<uint32_t> state;
  std::array<char, 1980> failure;
};

struct alignas(64) SegmentHeader {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t size;
  uint64_t slot_bytes;
  uint64_t message_bytes;
  uint64_t total_bytes;
  StepBarrier barrier;
  FailureBoard board;
};

struct SegmentOptions {
  int rank = 0;
  int size = 1;
  /// Of each of a rank's three slots. Smaller means more steps. Larger means that a step's data
  /// leaves the cache before it is read. Of 64 to 512 KiB this was fastest, measured with 512 KiB
  /// of level-2 cache per core.
  size_t slot_bytes = 256 << 10;
  /// Of the ring for messages from one rank to another. Only those that are used take memory.
  size_t message_bytes = 64 << 10;
  std::chrono::milliseconds timeout{120'000};  ///< Until all have come.
  std::string group = "0";                     ///< For messages.
  /// Called again and again with the ranks that are waited for. May throw.
  std::function<void(const std::vector<int>& ranks)> look = {};
};

/// How the ranks find each other: a store's set and its blocking get.
struct Meeting {
  std::function<void(const std::string& value)> tell;
  std::function<std::string()> ask;  ///< Throws when rank 0 does not tell in time.
};

/// Shared memory of a group of processes on one host, mapped. It has no name. Rank 0 makes a memfd
/// and hands it to the others over a Unix socket. The socket's name lies outside the file system
/// and ends with the process. Nothing is left behind however they end, and no mount's size limits
/// it. Only processes of the same user are given it. Its pages are reserved when it is made, so
/// that a lack of memory is an error here and no SIGBUS later. Pages for messages are reserved as
/// they are used.
class Segment {
 public:
  /// Blocks until rank 0 has been met by all. Throws TimeoutError naming who did not come,
  /// SystemError, UsageError for ranks of other users or other versions, CommError, and what
  /// `look` throws.
  Segment(const SegmentOptions& options, const Meeting& meeting);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  SegmentHeader& header() const { return *header_; }
  RankRecord& record(int rank) const;
  /// Whether the rank's process has ended, as far as that can be seen. Never blocks.
  ///
  /// One of this process namespace is seen by its number. One of another, as in a container beside
  /// this one, by a lock of an open file description of its own (fcntl, F_OFD_SETLK) on the byte of
  /// the memory at its rank, which the kernel lets go of when the process ends. Children that it
  /// has forked do not keep the lock.
  bool has_ended(int rank) const;
  size_t slot_bytes() const { return slot_bytes_; }
  /// The slot that `rank` writes in `step`. The data follows the header.
  std::byte* slot(int rank, uint64_t step) const {
    const auto index = static_cast<size_t>(rank) * kSlots + step % kSlots;
    return slots_ + index * (kSlotHeader + slot_bytes_);
  }
  size_t message_bytes() const { return message_bytes_; }
  /// Zeroed memory of `message_bytes` for what `from` sends to `to`.
  std::byte* messages(int from, int to) const {
    const auto index =
        static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
    return messages_ + index * message_bytes_;
  }

 private:
  void map(int fd, size_t bytes);
  void lock(int fd);
  void enter(int rank, const std::string& identity);
  void host(const SegmentOptions& options, const Meeting& meeting);
  void join(const SegmentOptions& options, const Meeting& meeting);

  int rank_;
  int size_;
  size_t slot_bytes_;
  size_t message_bytes_;
  Mapping mapping_;
  UnforkedFd lock_;
  SegmentHeader* header_ = nullptr;
  std::byte* slots_ = nullptr;
  std::byte* messages_ = nullptr;
};

}  // namespace lockstep::shm
