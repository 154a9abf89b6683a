#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/unforked_fd.h"
#include "lockstep/rpc/fast_link.h"

namespace lockstep::rpc::detail {

/// A connection to another worker, which has shown who it is.
struct SocketPeer {
  UniqueFd connection;          ///< Its reads and writes do not block.
  std::string name;             ///< "rank 1 (process 4711)"
  std::string key_in, key_out;  ///< Of each message's code; empty: messages have none.
};

/// Messages over TCP, by one connection for each two workers. In front of each message stands its
/// length and its number on this connection, and behind it, in a job with a secret, an HMAC-SHA256
/// of all that. Bytes that make no such message end the connection.
///
/// A connection that ends, in whatever way, tells both workers that no more comes
/// (FastCatch::lost). A slow reader has the system's buffers.
///
/// Each kind of waiter sleeps on a set (epoll) of its own: of the bell, which is rung for it alone,
/// and of the set of all connections while it is the one that these are to wake. What can be read
/// keeps that set ready, so that a thread which begins to sleep late wakes at once.
class SocketLink final : public FastLink {
 public:
  /// `peers`: by rank; without a connection: nobody is there. `has_processor`: this worker's,
  /// whatever the others of the host do. Throws SystemError.
  SocketLink(int rank, std::vector<SocketPeer> peers, bool has_processor);
  ~SocketLink() override { close(); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  bool send(int to, const FastHead& head, std::string_view bytes) override;
  void take(FastCatch& caught) override;
  bool look() const override;
  void lose(int rank) override;
  void close() noexcept override;
  std::string describe_end(int rank) const override;
  std::chrono::nanoseconds spin(const shm::SpinBudget& learnt) const override;
  void begin_look() override { add_lookers(1); }
  void end_look() override { add_lookers(-1); }
  void sleep(Waiter waiter, const std::function<bool()>& enough,
             std::chrono::nanoseconds limit) override;
  void wake(Waiter waiter) override;

  struct WireHead {
    uint32_t bytes;  ///< Of the message, without this head and the code.
    uint32_t kind;
    uint64_t count;  ///< Of the messages on this connection and direction, from 0.
    uint64_t number;
  };
  static_assert(sizeof(WireHead) == 24);

 private:
  struct Peer {
    UnforkedFd connection;
    std::string name, key_in, key_out;

    mutable std::mutex mutex;  ///< Of what goes out, and of how it went.
    std::string unsent;        ///< The rest of a message, for which there was no room.
    uint64_t sent = 0;
    bool ended = false;
    std::string how;

    // Under `taking_`.
    std::string in;  ///< What has come and makes no whole message yet.
    uint64_t received = 0;
  };

  Peer& peer(int rank) { return *peers_[static_cast<size_t>(rank)]; }
  void watch(int rank, bool for_room);
  bool flush(Peer& peer);
  void end(int rank, const std::string& how);
  void receive(int rank, FastCatch& caught);
  bool take_apart(int rank, std::vector<FastMessage>& messages);
  void add_lookers(int more);
  /// With `sleeping_`: lets the connections wake the one that they should.
  void choose();

  struct Sleeper {
    UniqueFd set;
    bool sleeps = false;
  };

  const int rank_;
  const bool has_processor_;
  std::vector<std::unique_ptr<Peer>> peers_;
  const UniqueFd connections_;  ///< The set of all. Ended ones leave it.
  const UniqueFd bell_;         ///< An eventfd that can always be read.
  std::mutex sleeping_;         ///< Guards the next three.
  std::array<Sleeper, kWaiters> sleepers_;
  int lookers_ = 0;
  std::optional<size_t> chosen_;
  std::mutex taking_;
  std::vector<char> buffer_;  ///< Under `taking_`.
};

}  // namespace lockstep::rpc::detail
