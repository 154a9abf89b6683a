#pragma once

#include <atomic>
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

/// The higher rank's part.
class Caller {
 public:
  using Clock = std::chrono::steady_clock;
  enum class End {
    known,      ///< Both ends know each other.
    hung_up,    ///< The connection ended, or it got late.
    a_stranger  ///< The other end is not that rank of this job.
  };
  Caller(int rank, std::string key, const std::atomic<bool>& stop)
      : rank_(rank), key_(std::move(key)), stop_(stop) {}
  /// `connection` does not block. Waits until `deadline`, or until a while after `stop` is set.
  End greet(const UniqueFd& connection, int other, Clock::time_point deadline);
  const Session& session() const { return session_; }

 private:
  bool send_all(const UniqueFd& to, const std::string& text, Clock::time_point deadline) const;
  bool receive_all(const UniqueFd& from, void* data, size_t size, Clock::time_point deadline) const;

  const int rank_;
  const std::string key_;
  const std::atomic<bool>& stop_;
  Session session_;
};

/// The lower rank's part. It waits for nothing: it goes on with what has come.
class Visitor {
 public:
  enum class State {
    talks,  ///< More must come.
    known,  ///< A rank of this job, which has been told so.
    gone    ///< It hung up, or has shown that it is none.
  };
  /// `connection` does not block.
  Visitor(UniqueFd connection, int own_rank, int size, std::string key);

  State go_on();
  /// Of the other, which has said hello.
  int rank() const { return static_cast<int>(session_.higher.rank); }
  bool has_said_hello() const { return has_said_hello_; }
  const Session& session() const { return session_; }
  int descriptor() const { return connection_.get(); }
  UniqueFd take_connection() { return std::move(connection_); }
  std::chrono::steady_clock::time_point came() const { return came_; }

 private:
  bool has_read(size_t bytes, bool& gone);
  bool say(const std::string& text) const;
  State on_hello();
  State on_proof();

  UniqueFd connection_;
  const int own_rank_, size_;
  const std::string key_;
  const std::chrono::steady_clock::time_point came_ = std::chrono::steady_clock::now();
  bool has_said_hello_ = false;
  std::string in_;
  Session session_;
};

}  // namespace lockstep::rpc::detail
