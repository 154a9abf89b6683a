#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/failure.h"
#include "lockstep/base/file.h"
#include "lockstep/base/unforked_fd.h"
#include "lockstep/comm/backends/backend.h"

namespace lockstep::hierarchical {

/// A connection between each two leaders, by which the hosts tell each other of failures. It needs
/// no store. When one breaks that was not closed, the leader at its other end has ended, or its
/// host was lost, also when no message is under way between the two. A connection also breaks when
/// the network has not reached its other end for the group's time-out. Forked children do not keep
/// the connections.
class HostLinks {
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
  /// What is called on the thread of `watch`. May not throw.
  struct Events {
    std::function<void(const Failure&)> failed;  ///< Another host's group has.
    /// A rank of another host makes no more calls than `calls` says.
    std::function<void(const Failure&)> left;
    /// The connection broke. `why`: "Connection reset by peer".
    std::function<void(int host, const std::string& why)> lost;
    std::function<void()> tick;  ///< Five times a second.
  };

  /// Blocks until all leaders have come. Throws TimeoutError naming one that did not connect,
  /// CommError, the errors of the store and of `look`.
  explicit HostLinks(Options options);
  /// Without `close` the others take it for a loss.
  ~HostLinks() { end(); }

  /// Once: starts the thread.
  void watch(Events events);
  /// Tells the other hosts of their event `failed` or `left`. Any thread. Never blocks.
  void tell_failed(const Failure& failure) noexcept { tell('F', encode(failure, kMostBytes)); }
  void tell_left(const Failure& left) noexcept { tell('L', encode(left, kMostBytes)); }
  /// Ends the thread, after an event that it is in, and the connections. Later calls do nothing.
  void close() noexcept {
    closing_ = true;
    tell('C', {});
    end();
  }

 private:
  static constexpr size_t kMostBytes = 2'000;
  void tell(char kind, const std::string& text) noexcept;
  void receive(size_t host);
  bool take_words(size_t host);
  void run();
  void end() noexcept;

  const Options options_;
  std::atomic<bool> closing_{false};     ///< The others may end connections first.
  std::mutex mutex_;                     ///< Held to send or to end a connection.
  std::vector<UnforkedFd> connections_;  ///< By host; null: its own, or ended.
  std::vector<std::string> received_;    ///< By host: what is not complete yet.
  UniqueFd wake_;
  Events events_;
  std::thread thread_;
};

}  // namespace lockstep::hierarchical
