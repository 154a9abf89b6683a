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

struct SharedGroupOptions {
  SegmentOptions segment;
  /// From all ranks' `Call::encoded`: which ranks differ in what.
  std::function<Failure(const std::vector<std::string>&)> judge;
};

/// One rank's end of the group: steps, and what becomes of them when a rank fails. One thread at a
/// time may be in a call. `fail` may come from any.
///
/// The ranks that wait for a peer notice its end within some 20 ms. The rank that sees it first
/// writes the failure on the group's board in shared memory. All waits, present and later, throw
/// it.
class SharedGroup {
 public:
  SharedGroup(SharedGroupOptions options, const Meeting& meeting);

  int rank() const { return segment_.rank(); }
  int size() const { return segment_.size(); }
  size_t slot_bytes() const { return segment_.slot_bytes(); }
  Segment& segment() { return segment_; }
  const Segment& segment() const { return segment_; }

  /// Begins a call: its hash goes with the step to come. Throws when the group has failed before.
  void begin(const Call& call);
  /// Where this rank's data of the step to come goes: `bytes` of them, at most a slot.
  std::byte* give(size_t bytes) { return segment_.slot(rank(), step_ + 1) + offset(bytes); }
  /// Tells the others that this rank has given.
  void arrive();
  /// Looks whether all have arrived, for at most `budget`.
  bool all_here(std::chrono::nanoseconds budget) const {
    return size() == 1 || segment_.header().barrier.spin(step_, size(), budget);
  }
  /// Blocks until all have arrived. Throws PeerLostError naming ranks that have ended or closed the
  /// group, TimeoutError naming those that did not come within `timeout`.
  void await(const Call& call, std::chrono::milliseconds timeout, Waiter waiter = Waiter::thread);
  /// After the first step of a call: throws MismatchError on all ranks when they did not all make
  /// the same. The group can be used afterwards.
  void compare(const Call& call, std::chrono::milliseconds timeout);
  /// The same for what a hash cannot say. All ranks must come to it.
  [[noreturn]] void differ(const Call& call, std::chrono::milliseconds timeout);
  /// All ranks' `Call::encoded`, for which they take one more step. All must come to it.
  std::vector<std::string> tell_calls(const Call& call, std::chrono::milliseconds timeout);
  /// What `rank` gave in the step last awaited, or `ago` steps before it (0 or 1): `bytes` of them.
  std::byte* given(int rank, size_t bytes, int ago = 0) const {
    return segment_.slot(rank, step_ - static_cast<uint64_t>(ago)) + offset(bytes);
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
  void leave(int64_t rounds = 0) noexcept { segment_.leave(rounds); }
  bool failed() const {
    return segment_.header().board.state.load(std::memory_order_acquire) != FailureBoard::empty;
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
  /// Segment::note_cause of a rank. Null where it has noted none.
  std::shared_ptr<const Failure> noted_cause(int rank) const;

 private:
  enum class Known : uint8_t { unknown, no, yes };
  static constexpr std::chrono::nanoseconds kSharedSpin{1'000};

  static size_t offset(size_t bytes) {
    return bytes <= kInlineBytes ? sizeof(SlotHeader) : kSlotHeader;
  }
  SlotHeader& header_of(int rank, uint64_t step) const {
    return *reinterpret_cast<SlotHeader*>(segment_.slot(rank, step));
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

  Segment segment_;
  std::vector<int> names_;
  std::function<Failure(const std::vector<std::string>&)> judge_;
  SpinBudget caller_spin_{kSpin, kCallerSpin};
  mutable std::atomic<Known> has_processor_{Known::unknown};
  uint64_t step_ = 0;  ///< The last at which this rank has arrived.
  uint64_t calls_ = 0;
  uint64_t hash_ = 0;  ///< Of the present call.
};

}  // namespace lockstep::shm
