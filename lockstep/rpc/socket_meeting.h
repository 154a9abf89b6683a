#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/rpc/socket_link.h"

namespace lockstep::rpc::detail {

/// How the ranks of a job connect for SocketLink, each to all others. Both ends of a connection
/// show that they know the job's secret, or without one the job's number, which only its ranks
/// have. Each end adds a random number, so nothing that was sent before counts. Who shows nothing
/// within two seconds is hung up on.
class SocketMeeting {
 public:
  SocketMeeting(int rank, int size, const std::string& secret, const std::string& job);

  /// Listens on any free port of that address. Returns what the others need. Throws CommError.
  std::string listen(const std::string& host);
  /// `addresses`: what all ranks' `listen` returned, by rank. `look` is called now and then while
  /// this rank waits, and may throw. At most half a minute, as others then have a slower way.
  /// Throws TimeoutError, CommError, DataError.
  std::vector<SocketPeer> connect(const std::vector<std::string>& addresses,
                                  std::chrono::milliseconds timeout,
                                  const std::function<void()>& look);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kNonce = 32, kProof = 32;
  struct Hello {
    uint64_t magic = 0;  ///< The same number on all machines of one byte order and version.
    int64_t rank = -1;
    char nonce[kNonce] = {};
  };
  struct Session {
    Hello lower, higher;  ///< Of the two ranks.
    std::string proof(const std::string& key, const char* what) const;
  };

  Hello own_hello() const;
  SocketPeer peer_of(UniqueFd connection, const Session& session, int other) const;
  SocketPeer call(int other, Clock::time_point deadline, const std::atomic<bool>& stop) const;
  /// Null connection: it was none of the job's.
  SocketPeer answer(UniqueFd connection, Clock::time_point deadline, int& other) const;

  void answer_all(std::vector<SocketPeer>& peers, Clock::time_point deadline,
                  const std::function<void()>& look) const;

  const int rank_, size_;
  const std::string key_;
  const bool has_secret_;
  UniqueFd listener_;
  std::vector<std::string> addresses_;
};

}  // namespace lockstep::rpc::detail
