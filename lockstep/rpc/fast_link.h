#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/shared_memory/futex.h"
#include "lockstep/comm/shared_memory/message_ring.h"
#include "lockstep/comm/shared_memory/shared_group.h"

namespace lockstep::rpc::detail {

/// What stands in front of a message's bytes.
struct FastHead {
  uint32_t kind = 0;
  uint64_t number = 0;  ///< Of the call, as its caller counts.
  uint64_t extra = 0;
  uint64_t hash = 0;
};

struct FastMessage {
  int from = 0;
  FastHead head;
  std::string bytes;
};

/// Messages between the workers of one host. Each ordered pair has a ring in shared memory, as
/// comm's messages have (message_ring.h). There a send and a receive of one size meet. Calls need
/// less: a message of any size goes one way, nobody confirms it, and whoever is at hand takes all
/// that has come. Any thread, except where said.
///
/// **Who is woken.** Threads that look for messages count themselves (`Look`). While there is one,
/// senders wake nobody. Else they wake the first of the beds that is not empty. Why no wake-up is
/// lost: a sender publishes, then reads `lookers` and `beds`. A thread that goes to bed enters
/// itself, reads the bell, then looks. One that ends its look, or gets up, must look once more. All
/// these steps are sequentially consistent, and Mailbox in message_ring.h says why that suffices.
///
/// A process that dies within a message has published nothing. What others of the same user write
/// into the shared memory on purpose is not guarded against, as in comm.
class FastLink {
 public:
  /// Where threads sleep, the first to be woken first.
  enum Bed : uint32_t { caller, guest, keeper };

  explicit FastLink(std::unique_ptr<shm::SharedGroup> group);
  FastLink(const FastLink&) = delete;
  FastLink& operator=(const FastLink&) = delete;

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  /// Bytes that a message may have.
  size_t most_bytes() const { return most_; }
  /// Memory for each ordered pair of workers. Pages that are not used take none.
  static constexpr size_t kRingBytes = 256 << 10;

  enum class WhenFull {
    refuse,  ///< When many wait already: false.
    keep,    ///< However many wait.
  };
  /// Gives the message to its receiver, or keeps it until there is room. Does not block. False: it
  /// is lost, or refused.
  bool send(int to, const FastHead& head, std::string_view bytes, WhenFull when_full);
  /// Takes out what has come, and sends on what waits for room. Nothing while another thread does.
  void take(std::vector<FastMessage>& messages);
  /// Whether `take` has something to do.
  bool look() const;

  /// Nothing is sent to that worker any more.
  void lose(int rank);
  /// "rank 1 (process 4711) has ended".
  std::string how_it_went(int rank) const { return group_->how_it_went(rank); }
  /// How long a thread may look before it sleeps.
  std::chrono::nanoseconds spin(const shm::SpinBudget& learnt) const {
    return group_->spin(learnt);
  }

  /// This thread looks for messages: others wake nobody. `look` once more after `end_look`.
  void begin_look() { inbox_->lookers.fetch_add(1, std::memory_order_seq_cst); }
  void end_look() { inbox_->lookers.fetch_sub(1, std::memory_order_seq_cst); }
  /// Sleeps until it is woken, unless `enough()`. One thread a bed. `look` once more afterwards.
  template <class Enough>
  void sleep(Bed bed, const Enough& enough, std::chrono::nanoseconds limit) {
    inbox_->beds.fetch_or(1U << bed, std::memory_order_seq_cst);
    const uint32_t seen = inbox_->bells[bed].load(std::memory_order_seq_cst);
    if (!enough() && !look()) shm::sleep_on(inbox_->bells[bed], seen, limit);
    inbox_->beds.fetch_and(~(1U << bed), std::memory_order_seq_cst);
  }
  /// Wakes who sleeps there in this process.
  void wake(Bed bed);

 private:
  /// In shared memory, one a worker, all zero at the start.
  struct Inbox {
    alignas(64) std::atomic<uint32_t> lookers;
    std::atomic<uint32_t> beds;  ///< A bit for each that is not empty.
    alignas(64) std::array<std::atomic<uint32_t>, 3> bells;
    /// A bit for each worker that has sent: the others' memory need not be touched.
    alignas(64) std::array<std::atomic<uint64_t>, 64> opened;
  };
  struct Waiting {
    FastHead head;
    std::string bytes;
  };
  struct Peer {
    std::mutex mutex;  ///< Of what goes out.
    shm::RingWriter out;
    std::deque<Waiting> waiting;  ///< For room.
    size_t waiting_bytes = 0;
    bool opened = false, lost = false;
    shm::RingReader in;  ///< Under `taking_`.
  };

  Inbox& inbox(int rank) const;
  void ring(int rank);
  static void ring_bed(Inbox& inbox, uint32_t bed);
  bool write_waiting(Peer& peer);
  bool put(Peer& peer, const FastHead& head, std::string_view bytes);
  bool take_from(int rank, std::vector<FastMessage>& messages);
  void flush(int rank);
  template <class Visit>
  bool any_opened(Visit visit) const;

  const std::unique_ptr<shm::SharedGroup> group_;
  size_t most_ = 0;
  Inbox* inbox_ = nullptr;
  std::vector<Peer> peers_;
  std::atomic<int> blocked_{0};  ///< Peers for which messages wait.
  std::mutex taking_;
};

}  // namespace lockstep::rpc::detail
