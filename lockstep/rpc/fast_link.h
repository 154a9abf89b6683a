#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/shared_memory/spin_budget.h"

namespace lockstep::rpc::detail {

/// What stands in front of a message's bytes.
struct FastHead {
  uint32_t kind = 0;
  uint64_t number = 0;  ///< Of the call, as its caller counts.
};

struct FastMessage {
  int from = 0;
  FastHead head;
  std::string bytes;
};

/// What `FastLink::take` has taken out.
struct FastCatch {
  std::vector<FastMessage> messages;
  /// Workers whose connection has ended, once each: nothing more comes from them.
  std::vector<int> lost;
};

/// Messages between the workers of a job, for calls. A message goes one way, nobody confirms it,
/// and those of a sender come in order. Whoever is at hand takes all that has come. All workers use
/// the same kind of link: RingLink (shared memory) where all are of one host, else SocketLink
/// (TCP), also between those that share a host. Threads can sleep for one kind of link only. Any
/// thread.
///
/// **Who is woken.** While a thread looks for messages (`begin_look`), others are woken for none.
/// Else the first kind of waiter that sleeps is. A thread that ends its look, or wakes up, must
/// look once more.
class FastLink {
 public:
  /// Who sleeps, the first to be woken first; see FastPath.
  enum Waiter : uint32_t { caller, handler, poller };
  /// Of a message that is sent: a ring takes two of them at least.
  static constexpr size_t kMostBytes = 127 << 10;
  static constexpr size_t kWaiters = 3;

  FastLink() = default;
  virtual ~FastLink() = default;
  FastLink(const FastLink&) = delete;
  FastLink& operator=(const FastLink&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Gives the message to its receiver. Does not block. False: that one is lost, or there is no
  /// room.
  virtual bool send(int to, const FastHead& head, std::string_view bytes) = 0;
  /// Takes out what has come. Nothing while another thread does.
  virtual void take(FastCatch& caught) = 0;
  /// Whether `take` has something to do.
  virtual bool look() const = 0;

  /// Nothing is sent to that worker any more.
  virtual void lose(int rank) = 0;
  /// Nothing is sent or comes any more. The others see it where they can.
  virtual void close() noexcept {}
  /// "rank 1 (process 4711) has ended".
  virtual std::string describe_end(int rank) const = 0;
  /// How long a thread may look before it sleeps.
  virtual std::chrono::nanoseconds spin(const shm::SpinBudget& learnt) const = 0;

  virtual void begin_look() = 0;
  virtual void end_look() = 0;
  /// Sleeps until it is woken or there is something to take, unless `enough()`. One thread of a
  /// kind at a time.
  virtual void sleep(Waiter waiter, const std::function<bool()>& enough,
                     std::chrono::nanoseconds limit) = 0;
  /// Wakes the one of this kind that sleeps in this process.
  virtual void wake(Waiter waiter) = 0;
};

}  // namespace lockstep::rpc::detail
