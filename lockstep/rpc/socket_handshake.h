#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "lockstep/base/file.h"

namespace lockstep::rpc::detail {

/// What the two ends of a connection of SocketMeeting say before the first message. Each says hello
/// with a random number, so nothing that was sent before counts. Then each shows that it knows the
/// key: the lower rank, which was called, first. Its last word says that it took the other for what
/// it is: so neither believes in a connection that the other has given up.
struct Session {
  static constexpr size_t kNonce = 32;
  struct Hello {
    uint64_t magic = 0;  ///< The same number on all machines of one byte order and version.
    int64_t rank = -1;
    char nonce[kNonce] = {};
  };
  Hello lower, higher;  ///< Of the two ranks.

  /// What shows to the other end of this connection that one knows the key. 32 bytes.
  std::string proof(const std::string& key, const char* what) const;
};

/// One end of a connection, until both know each other. It waits for nothing: it goes on with what
/// has come. One thread at a time.
class Handshake {
 public:
  using Clock = std::chrono::steady_clock;
  enum class State {
    talks,      ///< More must come.
    known,      ///< Each end knows the other, and that the other knows it.
    hung_up,    ///< The connection ended.
    a_stranger  ///< The other end is no such rank of this job.
  };
  /// `connection` does not block. The other end is to be a rank from `first` to `last`, of which
  /// this end calls those below its own.
  Handshake(UniqueFd connection, int own_rank, int first, int last, std::string key);

  State go_on();
  /// Of the other end. Known once it has said hello; a caller knows it before.
  int rank() const;
  bool has_said_hello() const { return heard_ > 0; }
  const Session& session() const { return session_; }
  int descriptor() const { return connection_.get(); }
  UniqueFd take_connection() { return std::move(connection_); }
  Clock::time_point begun() const { return begun_; }

 private:
  bool calls() const { return last_ < own_rank_; }
  bool has_read(size_t bytes);
  State say(const std::string& text, State then) const;
  State on_hello();
  State on_proof();

  UniqueFd connection_;
  int own_rank_, first_, last_;
  std::string key_;
  Clock::time_point begun_ = Clock::now();
  State state_ = State::talks;
  int heard_ = 0;  ///< Words of the other end.
  std::string in_;
  Session session_;
};

}  // namespace lockstep::rpc::detail
