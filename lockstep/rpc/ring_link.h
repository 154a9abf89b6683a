#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/shared_memory/message_ring.h"
#include "lockstep/comm/shared_memory/shared_group.h"
#include "lockstep/rpc/fast_link.h"

namespace lockstep::rpc::detail {

/// Messages over shared memory. Each ordered pair of workers has a ring, as comm's messages have
/// (message_ring.h). There a send and a receive of one size meet. Calls need less.
///
/// Why no wake-up is lost: a sender publishes, then reads `lookers` and `waiters`. A thread that is
/// about to sleep enters itself, reads the bell, then looks. All these steps are sequentially
/// consistent, and Mailbox in message_ring.h says why that suffices.
///
/// A process that dies within a message has published nothing. What others of the same user write
/// into the shared memory on purpose is not guarded against, as in comm. Nobody is told here when a
/// worker dies: liveness calls do that.
class RingLink final : public FastLink {
 public:
  explicit RingLink(std::unique_ptr<shm::SharedGroup> group);

  /// Memory for each ordered pair of workers, for some hundred calls of 4 KiB under way. Pages that
  /// are not used take none.
  static constexpr size_t kRingBytes = 512 << 10;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  bool send(int to, const FastHead& head, std::string_view bytes) override;
  void take(FastCatch& caught) override;
  bool look() const override;
  void lose(int rank) override;
  std::string describe_end(int rank) const override { return describe(group_->end_of(rank)); }
  std::chrono::nanoseconds spin(const shm::SpinBudget& learnt) const override {
    return group_->spin(learnt);
  }
  void begin_look() override { inbox_->lookers.fetch_add(1, std::memory_order_seq_cst); }
  void end_look() override { inbox_->lookers.fetch_sub(1, std::memory_order_seq_cst); }
  void sleep(Waiter waiter, const std::function<bool()>& enough,
             std::chrono::nanoseconds limit) override;
  void wake(Waiter waiter) override;

 private:
  /// In shared memory, one a worker, all zero at the start.
  struct Inbox {
    alignas(64) std::atomic<uint32_t> lookers;
    std::atomic<uint32_t> waiters;  ///< A bit for each kind that sleeps.
    alignas(64) std::array<std::atomic<uint32_t>, kWaiters> bells;
  };
  struct Peer {
    std::mutex mutex;  ///< Of what goes out.
    shm::RingWriter out;
    bool lost = false;
    shm::RingReader in;  ///< Under `taking_`.
  };

  Inbox& inbox(int rank) const;
  void ring(int rank);
  static void wake_waiter(Inbox& inbox, uint32_t waiter);
  void take_from(int rank, std::vector<FastMessage>& messages);

  const std::unique_ptr<shm::SharedGroup> group_;
  Inbox* inbox_ = nullptr;
  std::vector<Peer> peers_;
  std::mutex taking_;
};

}  // namespace lockstep::rpc::detail
