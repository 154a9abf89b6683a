#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/rpc/socket_link.h"

namespace lockstep::rpc::detail {

/// How the ranks of a job connect for SocketLink: each calls those below it, then answers those
/// above it, one after the other. Each end says a random number, so nothing that was sent before
/// counts. Then each shows that it knows the job's secret, or without one the job's number, which
/// only its ranks have: first the one that was called. Who calls and shows nothing is hung up on
/// after two seconds, for which others wait.
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

  SocketPeer call(int other, Clock::time_point deadline, const std::function<void()>& look) const;
  /// Who has called. None: no rank of this job.
  std::optional<int> answer(UniqueFd connection, std::vector<SocketPeer>& peers) const;
  SocketPeer peer_of(UniqueFd connection, int other, const std::string& session) const;
  std::string proof(const std::string& session, const char* what) const;
  std::string name_of(int other) const;

  const int rank_, size_;
  const std::string key_;
  const bool has_secret_;
  UniqueFd listener_;
  std::vector<std::string> addresses_;
};

}  // namespace lockstep::rpc::detail
