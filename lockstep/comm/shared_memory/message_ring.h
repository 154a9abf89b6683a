#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

/// Where a rank sleeps while it waits for messages: one per rank, in shared memory, all zero at the
/// start. A thread that has changed something that the rank may wait for rings its doorbell.
///
/// Why no wake-up is lost (all four steps are sequentially consistent):
/// - A thread that changes something publishes it (A), then reads `sleepers` (B). When that is not
///   zero, it adds to `doorbell` and wakes (E).
/// - A thread that goes to sleep adds to `sleepers` (C), reads `doorbell`, then looks for what was
///   published (D). It sleeps if `doorbell` still holds what was read (the kernel compares).
///
/// If D does not see A, then D precedes A, so C precedes B, and E follows. E comes after the read
/// of `doorbell`: else D would come after A. So either the kernel's comparison fails, or the wake
/// finds the sleeper. What is published may be:
/// - frames in a ring to this rank (`written`),
/// - room in a ring from it (`read`, see RingWriter::waiting),
/// - a ring used for the first time (`opened`),
/// - a message that another thread of the same process has finished.
///
/// A process that dies takes its own sleepers with it. Nobody else sleeps here.
struct Mailbox {
  alignas(64) std::atomic<uint32_t> doorbell;
  alignas(64) std::atomic<uint32_t> sleepers;
  /// One bit per rank that has used its ring to this one: the others' memory need not be touched.
  alignas(64) std::array<std::atomic<uint64_t>, 64> opened;

  /// Step B and E.
  void ring();
};

enum class FrameKind : uint32_t {
  pad = 1,   ///< Nothing, up to the end of the ring.
  announce,  ///< A send, with its data when it is small.
  ack,       ///< The announced message was received.
  clear,     ///< A receive has met the announced message, its data may come.
  data,      ///< A piece of it.
  refuse,    ///< A receive of another type or size has met it.
  abort,     ///< The answer to `clear` of a send that has meanwhile been given up.
};

/// What lies in a ring: a multiple of 64 bytes, never across the ring's end.
struct Frame {
  FrameKind kind;
  uint32_t bytes;  ///< Of the payload; for a pad: of the whole.
  int32_t tag;
  uint32_t eager;  ///< announce: 1 when the payload is the message.
  uint64_t id;     ///< announce, ack, clear, refuse: of the send; else of the receive.
  uint64_t size;   ///< announce: of the message; clear: the receive's id; refuse: its size.
  uint64_t hash;   ///< announce, refuse: Call::hash.
};
static_assert(sizeof(Frame) == 40);

/// The first cache lines of a ring.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> written;  ///< Bytes that the writer has ever put in.
  alignas(64) std::atomic<uint64_t> read;     ///< Bytes that the reader has ever taken out.
  /// Not zero: ring when there is room. Only the writer changes it. The reader would clear what the
  /// writer has set anew.
  alignas(64) std::atomic<uint32_t> writer_waits;
};

/// Bytes for frames in a ring of `memory` bytes.
size_t ring_capacity(size_t memory);

/// One of the two ends of a ring.
class RingEnd {
 public:
  /// `memory` holds a RingHeader and the ring. It is not touched before the first use.
  void attach(std::byte* memory, size_t bytes);

 protected:
  /// Goes `bytes` further in the ring.
  void step(size_t bytes) { offset_ = offset_ + bytes == capacity_ ? 0 : offset_ + bytes; }

  RingHeader* header_ = nullptr;
  std::byte* ring_ = nullptr;
  size_t capacity_ = 0;
  size_t offset_ = 0;  ///< Of `position_` in the ring.
};

/// The only writer of a ring. One thread at a time, except where said.
///
/// `written` is stored after the frames, so a reader that sees it sees them. A writer that dies
/// within a frame has written nothing. `read` is stored after the reader has copied what it needs,
/// so the writer overwrites only what nobody looks at.
class RingWriter : public RingEnd {
 public:
  /// A place for the payload of `frame`, whose `bytes` are at most half the capacity less a line.
  /// Null when there is no room: then `blocked()` holds until there is or `unblock` is called.
  std::byte* put(const Frame& frame);
  /// Shows the reader what was put. False when there was nothing new. Ring the bell afterwards.
  bool publish();
  /// Makes `moved()` true until the next `put`: there is more to write than one turn should.
  void again() { waiting_.store(kAgain, std::memory_order_seq_cst); }
  void unblock();
  bool waiting() const { return waiting_.load(std::memory_order_seq_cst) != 0; }
  /// Any thread: whether it is worth trying again to `put`.
  bool moved() const;

 private:
  static constexpr uint64_t kAgain = UINT64_MAX;
  bool room(size_t bytes);

  uint64_t position_ = 0;  ///< Written, published or not.
  uint64_t published_ = 0;
  uint64_t read_ = 0;  ///< As last seen.
  /// 0: not blocked; else 1 + `read` when it was found full.
  std::atomic<uint64_t> waiting_{0};
};

/// The only reader of a ring. One thread at a time, except where said.
class RingReader : public RingEnd {
 public:
  /// The next frame, which stays where it is until `release`. Null when there is none.
  const Frame* next();
  const std::byte* payload(const Frame& frame) const;
  /// Goes behind `frame`, which `next` gave.
  void pop(const Frame& frame);
  /// Gives the memory of what was popped back. True when the writer waits for it: ring its bell.
  bool release();
  size_t unreleased() const { return position_.load(std::memory_order_relaxed) - released_; }
  /// Any thread: whether there is a frame.
  bool filled() const {
    return header_->written.load(std::memory_order_seq_cst) !=
           position_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> position_{0};
  uint64_t released_ = 0;
  uint64_t written_ = 0;  ///< As last seen.
};

}  // namespace lockstep::shm
