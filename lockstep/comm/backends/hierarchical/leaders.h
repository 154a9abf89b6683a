#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/comm/shared_memory/deadline.h"

namespace lockstep::hierarchical {

/// Thrown by Leaders: a message between hosts did not come to its end.
struct HostFailure {
  enum class Kind { lost, late, failed_elsewhere } kind;
  int host = 0;      ///< The other one.
  std::string text;  ///< What the backend said of it.
};

/// Bytes under way to or from another host.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  int host = 0;
};
using Transfers = std::vector<Transfer>;

/// How the leaders of hosts exchange bytes: in messages of a group of all ranks over Gloo. Between
/// two hosts they arrive in the order in which they are posted. Both sides post the same sizes.
/// Memory must live until the transfer has ended. One thread at a time, except where said.
///
/// Gloo closes its connections when a send or a receive runs into a time-out of its own. So waits
/// have none. Another thread ends them by `look` and `interrupt`.
class Leaders {
 public:
  /// `ranks`: the leaders, by host.
  explicit Leaders(std::vector<int> ranks) : ranks_(std::move(ranks)) {}
  /// The group, before the first message.
  void use(c10::intrusive_ptr<c10d::Backend> backend) { backend_ = std::move(backend); }

  /// Appended to `transfers`, but not for 0 bytes. Do not block. Throw HostFailure.
  void send(int host, const std::byte* data, size_t bytes, Transfers& transfers) {
    post(true, host, const_cast<std::byte*>(data), bytes, transfers);
  }
  void receive(int host, std::byte* data, size_t bytes, Transfers& transfers) {
    post(false, host, data, bytes, transfers);
  }
  /// Waits for all and empties the list. Throws HostFailure.
  void finish(Transfers& transfers, std::chrono::milliseconds timeout);
  /// For which host a `finish` waits, or has failed to wait. None: no such wait. Any thread.
  std::optional<int> awaited() const {
    const int host = awaited_;
    return host < 0 ? std::nullopt : std::optional(host);
  }
  /// Ends a `finish` whose time is up. Any thread, several times a second.
  void look();
  /// Ends what waits, now and later, as failed elsewhere. Any thread.
  void interrupt();

 private:
  using Kind = HostFailure::Kind;
  void post(bool sends, int host, std::byte* data, size_t bytes, Transfers& transfers);
  void wait(const Transfer& transfer);

  const std::vector<int> ranks_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<int> awaited_{-1};
  std::mutex mutex_;
  c10d::Work* current_ = nullptr;
  std::optional<shm::Deadline> deadline_;  ///< Of the present `finish`.
  std::optional<Kind> ended_;              ///< Why the present wait was ended.
  bool interrupted_ = false;
};

}  // namespace lockstep::hierarchical
