#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file.h"

namespace lockstep {

struct SocketMeetingOptions {
  int self = 0;                    ///< This member's number.
  std::vector<std::string> names;  ///< Of all members, for messages.
  std::string key;                 ///< What they alone know.
  std::string hint = {};           ///< What to do where one does not come.
};

/// A connection to another member, which has shown that it is one.
struct MetPeer {
  UniqueFd connection;  ///< Its reads and writes do not block. Null: this member itself.
  std::string session;  ///< The same at both ends, and of no other connection.
};

/// How the members of a group get a TCP connection between each two: each calls those below it,
/// then answers those above it, one after the other. Each end says a random number, so nothing that
/// was sent before counts. Then each shows that it knows the key: first the one that was called.
/// Who calls and shows nothing is hung up on after two seconds, for which others wait.
class SocketMeeting {
 public:
  explicit SocketMeeting(SocketMeetingOptions options) : options_(std::move(options)) {}
  /// Listens on any free port of that address. Returns what those above need. Throws CommError.
  std::string listen(const std::string& host);
  /// By number. `addresses`: what `listen` returned on those below. `look` is called now and then
  /// with the members that this one waits for, and may throw. Throws TimeoutError naming a member
  /// that does not come, CommError, DataError.
  std::vector<MetPeer> connect(const std::vector<std::string>& addresses,
                               std::chrono::milliseconds timeout,
                               const std::function<void(const std::vector<int>&)>& look);

 private:
  using Clock = std::chrono::steady_clock;
  using Look = std::function<void()>;
  MetPeer call(int other, const std::string& address, Clock::time_point deadline,
               const Look& look) const;
  /// Who has called. None: no member.
  std::optional<int> answer(UniqueFd connection, std::vector<MetPeer>& peers) const;
  std::string proof(const std::string& session, const char* what) const;
  [[noreturn]] void throw_missing(int other, const std::string& why) const;

  const SocketMeetingOptions options_;
  std::chrono::milliseconds timeout_{};
  UniqueFd listener_;
};

}  // namespace lockstep
