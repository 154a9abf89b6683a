#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/rpc/socket_handshake.h"
#include "lockstep/rpc/socket_link.h"

namespace lockstep::rpc::detail {

/// How the ranks of a job connect for SocketLink, each to all others. Both ends of a connection
/// show that they know the job's secret, or without one the job's number, which only its ranks
/// have: see Session. Who shows nothing within two seconds is hung up on, and holds nobody up until
/// then.
class SocketMeeting {
 public:
  SocketMeeting(int rank, int size, const std::string& secret, const std::string& job);

  /// Listens on any free port of that address. Returns what the others need. Throws CommError.
  std::string listen(const std::string& host);
  /// `addresses`: what all ranks' `listen` returned, by rank. `look` is called now and then while
  /// this rank waits, and may throw. At most half a minute, as others then have a slower way.
  /// Throws TimeoutError with the ranks that are missing, CommError, DataError.
  std::vector<SocketPeer> connect(const std::vector<std::string>& addresses,
                                  std::chrono::milliseconds timeout,
                                  const std::function<void()>& look);

 private:
  using Clock = std::chrono::steady_clock;
  using Peers = std::vector<SocketPeer>;
  using Call = std::function<Handshake(int other)>;

  SocketPeer peer_of(Handshake& known) const;
  std::string name_of(int other) const;
  Handshake call(int other, Clock::time_point deadline, const std::function<void()>& look) const;
  void wait_for_words(const std::list<Handshake>& calls, const std::list<Handshake>& visitors,
                      Clock::time_point deadline) const;
  void let_in(std::list<Handshake>& visitors) const;
  static void turn_away_one(std::list<Handshake>& visitors);
  void go_on_with(std::list<Handshake>& visitors, Peers& peers) const;
  void go_on_with_calls(std::list<Handshake>& calls, Peers& peers, const Call& call_again) const;
  std::vector<int> missing(const Peers& peers) const;

  const int rank_, size_;
  const std::string key_;
  const bool has_secret_;
  UniqueFd listener_;
  std::vector<std::string> addresses_;
};

}  // namespace lockstep::rpc::detail
