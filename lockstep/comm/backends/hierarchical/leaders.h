#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/hierarchical/transfer_wait.h"

namespace lockstep::hierarchical {

/// By what the leaders of hosts talk, as between_hosts (hierarchical.h) says.
struct HostsBackend {
  std::string name;
  BackendTraits traits;
  MadeBackend (*make)(const BackendOptions& options);
};
const HostsBackend& hosts_backend();

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

/// How the leaders of hosts exchange bytes: in messages. Between two hosts they arrive in the order
/// in which they are posted. Both sides post the same sizes. Memory must live until the transfer
/// has ended. One thread at a time.
class Leaders {
 public:
  using Clock = TransferWait::Clock;
  /// `ranks`: of each host's leader in the backend, which has send and recv for CPU tensors.
  Leaders(const MadeBackend& made, std::vector<int> ranks, FirstFailure& first_failure)
      : backend_(made.backend),
        ranks_(std::move(ranks)),
        ends_waits_(made.traits.ends_waits_by_abort),
        wait_(first_failure) {}

  int hosts() const { return static_cast<int>(ranks_.size()); }

  /// Appended to `transfers`, but not for 0 bytes. Do not block. Throw HostFailure.
  void send(int host, const std::byte* data, size_t bytes, Transfers& transfers) {
    post(true, host, const_cast<std::byte*>(data), bytes, transfers);
  }
  void receive(int host, std::byte* data, size_t bytes, Transfers& transfers) {
    post(false, host, data, bytes, transfers);
  }
  /// Waits for all and empties the list. Throws HostFailure.
  void finish(Transfers& transfers, Clock::time_point deadline);
  /// For which host a `finish` waits, or has failed to wait. None: no such wait. Any thread.
  std::optional<int> awaited() const {
    const int host = awaited_;
    return host < 0 ? std::nullopt : std::optional(host);
  }
  /// Ends what waits, now and later. Any thread.
  void interrupt() { wait_.interrupt(); }

 private:
  void post(bool sends, int host, std::byte* data, size_t bytes, Transfers& transfers);

  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::vector<int> ranks_;
  const bool ends_waits_;  ///< What a TransferWait can wait for; others are asked again and again.
  TransferWait wait_;
  std::atomic<int> awaited_{-1};
};

}  // namespace lockstep::hierarchical
