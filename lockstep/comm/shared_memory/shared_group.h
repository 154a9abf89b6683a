#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/shared_memory/memory.h"
#include "lockstep/comm/shared_memory/segment.h"
#include "lockstep/comm/shared_memory/spin_budget.h"

namespace lockstep::shm {

/// What this rank calls, as far as the others and messages need it. Asked for its texts only when
/// something has gone wrong.
class Call {
 public:
  virtual ~Call() = default;
  /// Equal on all ranks whose calls fit together.
  virtual uint64_t hash() const = 0;
  /// The whole, for the others to compare; at most a slot. Messages have none.
  virtual std::string encoded() const { return {}; }
  /// "all_reduce(sum) of float32 [4], collective 7 of group '0',"
  virtual std::string text() const = 0;
};

/// How long a wait sleeps before it looks who is alive: a look reads a file of /proc a rank.
inline constexpr std::chrono::milliseconds kSlice{20};

/// What waits for a call: its caller, which has nothing else to do, or the group's thread.
enum class Waiter : uint8_t { caller, thread };

struct SharedGroupOptions : MeetingOptions {
  /// Of each of a rank's three slots. Smaller means more steps. Larger means that a step's data
  /// leaves the cache before it is read. Of 64 to 512 KiB this was fastest, measured with 512 KiB
  /// of level-2 cache per core.
  size_t slot_bytes = 256 << 10;
  /// Of the ring for messages from one rank to another. Only those that are used take memory.
  size_t message_bytes = 64 << 10;
  /// From all ranks' `Call::encoded`: which ranks differ in what.
  std::function<Failure(const std::vector<std::string>&)> judge;
};

/// One rank's end of a group of processes on one host, in memory that they share: steps, and what
/// becomes of them when a rank fails. One thread at a time may be in a call. `fail` may come from
/// any.
///
/// The ranks that wait for a peer notice its end within some 20 ms. The rank that sees it first
/// writes the failure on the group's board in shared memory. All waits, present and later, throw
/// it.
///
/// The memory is reserved when it is made, so that a lack of it is an error here and no SIGBUS
/// later. Pages for messages are reserved as they are used.
class SharedGroup {
 public:
  /// Blocks until rank 0 has been met by all. Throws what SharedMemory throws, and CommError for
  /// ranks of other versions.
  SharedGroup(const SharedGroupOptions& options, const Meeting& meeting);
  ~SharedGroup() { leave(); }
  SharedGroup(const SharedGroup&) = delete;
  SharedGroup& operator=(const SharedGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return slot_bytes_; }
  const RankRecord& record(int rank) const { return records_[rank]; }
  size_t message_bytes() const { return message_bytes_; }
  /// Zeroed memory of `message_bytes` for what `from` sends to `to`. There is more at `size()`, for
  /// what all others tell `from`.
  std::byte* messages(int from, int to) const {
    const auto index =
        static_cast<size_t>(from) * static_cast<size_t>(size_ + 1) + static_cast<size_t>(to);
    return messages_ + index * message_bytes_;
  }

  /// Begins a call: its hash goes with the step to come. Throws when the group has failed before.
  void begin(const Call& call);
  /// Where this rank's data of the step to come goes: `bytes` of them, at most a slot.
  std::byte* give(size_t bytes) { return slot(rank(), step_ + 1) + offset(bytes); }
  /// Tells the others that this rank has given.
  void arrive();
  /// Looks whether all have arrived, for at most `budget`.
  bool all_here(std::chrono::nanoseconds budget) const {
    return size() == 1 || header_->barrier.spin(step_, size(), budget);
  }
  /// Blocks until all have arrived. Throws PeerLostError naming ranks that have ended or closed the
  /// group, TimeoutError naming those that did not come within `timeout`.
  void await(const Call& call, std::chrono::milliseconds timeout, Waiter waiter = Waiter::thread);
  /// After the first step of a call: throws MismatchError on all ranks when they did not all make
  /// the same. The group can be used afterwards.
  void compare(const Call& call, std::chrono::milliseconds timeout);
  /// The same for what a hash cannot say. All ranks must come to it: they tell each other their
  /// calls in one more step.
  [[noreturn]] void differ(const Call& call, std::chrono::milliseconds timeout);
  /// What `rank` gave in the step last awaited, or `ago` steps before it (0 or 1): `bytes` of them.
  std::byte* given(int rank, size_t bytes, int ago = 0) const {
    return slot(rank, step_ - static_cast<uint64_t>(ago)) + offset(bytes);
  }

  /// How long a thread of the group's looks for others before it sleeps. Where ranks share
  /// processors it hardly looks: looking keeps the processor from the rank that is waited for. Any
  /// thread.
  std::chrono::nanoseconds spin() const { return has_processor() ? kSpin : kSharedSpin; }
  /// The same of a caller that has nothing else to do. `learnt` is its own SpinBudget, of `kSpin`
  /// to `kCallerSpin`.
  std::chrono::nanoseconds spin(const SpinBudget& learnt) const {
    return has_processor() ? learnt.now() : kSharedSpin;
  }
  /// About as long as sleeping and waking take.
  static constexpr std::chrono::nanoseconds kSpin{100'000};
  /// In a step of training the ranks come within some 200 us of each other. A rank that sleeps then
  /// wakes too late. 500 us made a step of an MLP 5% faster than 100 us; more made it no faster.
  static constexpr std::chrono::nanoseconds kCallerSpin{500'000};

  /// Fails the group for all ranks. Does nothing when it has failed before. Never blocks.
  void fail(const Failure& failure) noexcept;
  /// Tells the others that this rank calls nothing any more, after `rounds` of its program's loop.
  void leave(int64_t rounds = 0) noexcept;
  /// For the others, if this rank leaves over it: why its meeting failed, or the end of another
  /// rank that made one of its messages fail. The first counts.
  void note_cause(const Failure& cause) noexcept;
  bool failed() const {
    return header_->board.state.load(std::memory_order_acquire) != FailureBoard::empty;
  }
  /// Why the group is of no more use. None while it is not, or while that is being written.
  std::optional<Failure> failure() const;
  /// Throws the group's failure as that of `what` this rank did. Does nothing when there is none.
  /// A rank may have given the group up over what happened elsewhere. Then the error also names the
  /// `awaited`, for whom this rank still waited, unless the failure concerns them.
  void throw_if_failed(const std::string& what,
                       const std::vector<Failure::Rank>& awaited = {}) const;
  /// For waits outside of steps: throws the group's failure as that of `what` this rank did. Also
  /// when one of `ranks` has ended or left: then it fails the group first.
  void look_after(const std::vector<int>& ranks, const std::string& what);
  /// Names of the ranks in messages: their numbers in the default group.
  const std::vector<int>& names() const { return names_; }
  /// "rank 1 (process 4711)".
  std::string name(int rank) const;
  bool gone(int rank) const;
  /// A rank of the group, which is of this kind.
  Failure::Rank member(int rank, Failure::Kind kind) const;
  std::vector<Failure::Rank> members(const std::vector<int>& ranks, Failure::Kind kind) const;
  /// How a rank that is gone went, and over what.
  Failure end_of(int rank) const;
  /// `note_cause` of a rank. Null where it has noted none.
  std::shared_ptr<const Failure> noted_cause(int rank) const;

 private:
  enum class Known : uint8_t { unknown, no, yes };
  static constexpr std::chrono::nanoseconds kSharedSpin{1'000};

  static size_t offset(size_t bytes) {
    return bytes <= kInlineBytes ? sizeof(SlotHeader) : kSlotHeader;
  }
  /// What `rank` writes in `step`. The data follows the header.
  std::byte* slot(int rank, uint64_t step) const {
    const auto index = static_cast<size_t>(rank) * kSlots + step % kSlots;
    return slots_ + index * (kSlotHeader + slot_bytes_);
  }
  SlotHeader& header_of(int rank, uint64_t step) const {
    return *reinterpret_cast<SlotHeader*>(slot(rank, step));
  }
  /// Whether this rank has a processor to itself. False until all have come: only then it is known.
  bool has_processor() const {
    const auto known = has_processor_.load(std::memory_order_relaxed);
    return known == Known::unknown ? find_processor() : known == Known::yes;
  }
  bool find_processor() const;
  void await_as_caller(const Call& call, std::chrono::milliseconds timeout);
  /// `await`, when looking was not enough.
  void wait_for_all(const Call& call, std::chrono::milliseconds timeout);
  std::vector<int> missing() const;
  /// Of `ranks`, looks for those that have ended or left without having arrived at `step`. When
  /// there are any, fails the group and returns true.
  bool notice_lost(const std::vector<int>& ranks, uint64_t step);
  Failure late(const std::vector<int>& ranks, std::chrono::milliseconds timeout) const;

  const int rank_, size_;
  const size_t slot_bytes_, message_bytes_;
  SharedMemory memory_;
  SegmentHeader* const header_;
  RankRecord* const records_;
  std::byte* const slots_;
  std::byte* const messages_;
  std::vector<int> names_;
  std::function<Failure(const std::vector<std::string>&)> judge_;
  SpinBudget caller_spin_{kSpin, kCallerSpin};
  mutable std::atomic<Known> has_processor_{Known::unknown};
  uint64_t step_ = 0;  ///< The last at which this rank has arrived.
  uint64_t calls_ = 0;
  uint64_t hash_ = 0;  ///< Of the present call.
};

}  // namespace lockstep::shm
