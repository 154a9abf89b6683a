#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/unforked_fd.h"
#include "lockstep/comm/backends/backend.h"

namespace lockstep::hierarchical {

/// A connection between each two leaders over which nothing is sent but a good-bye or last words.
/// When one breaks without them, the host at its other end was lost, also when no message is under
/// way between the two. A connection also breaks when the network has not reached its other end for
/// the group's time-out. Forked children do not keep the connections.
class Lifeline {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;  ///< A prefix of its own.
    int host = 0;                           ///< This leader's.
    std::vector<std::string> names;         ///< Of all hosts, for messages.
    std::string address = "127.0.0.1";      ///< Of this host, at which the others reach it.
    std::chrono::milliseconds timeout{120'000};
    /// Called again and again with the hosts that are waited for. May throw.
    std::function<void(const std::vector<int>& hosts)> look = {};
  };
  struct Break {
    int host = 0;
    std::string why;         ///< "Connection reset by peer"
    std::string last_words;  ///< Of the other end; empty when it could say none.
  };

  /// Blocks until all leaders have come. Throws TimeoutError naming one that did not, CommError,
  /// the errors of the store and of `look`.
  explicit Lifeline(Options options);
  /// Without a word, unless `close` or `break_off` said one.
  ~Lifeline();

  /// One that is broken by now. Not after `watch`.
  std::optional<Break> broken();
  /// Once: from now on calls `lost`, on a thread that it starts, for each connection that breaks or
  /// is broken already, and `tick` four times a second.
  void watch(std::function<void(const Break&)> lost, std::function<void()> tick);
  /// Ends the thread, after a call of these that it is in, and the connections. The others are not
  /// to take it for a loss. Later calls do nothing.
  void close() noexcept;
  /// Likewise, but the others learn of a break: with these words, unless they are empty. They are
  /// cut at 4,000 bytes.
  void break_off(const std::string& last_words) noexcept;

 private:
  struct Place;
  void connect_to_host(int host, const std::string& word);
  void accept_hosts(int listener, const std::string& token);
  std::vector<int> hosts_to_accept() const;
  std::optional<int> read_hello(int connection, const std::string& token);
  [[noreturn]] void throw_missing(int host, const std::string& why) const;
  std::chrono::milliseconds left() const;
  std::optional<Break> broken(int host);
  void run();
  void end(const std::string& last) noexcept;

  const Options options_;
  const std::chrono::steady_clock::time_point deadline_;  ///< Of the meeting.
  std::vector<UnforkedFd> connections_;  ///< By host; null: its own, ended or never made.
  std::vector<std::string> said_;        ///< By host, since it came.
  UniqueFd wake_;
  std::function<void(const Break&)> lost_;
  std::function<void()> tick_;
  std::thread thread_;
};

}  // namespace lockstep::hierarchical
