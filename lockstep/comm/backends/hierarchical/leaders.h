#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "lockstep/comm/backends/hierarchical/watch.h"

namespace lockstep::hierarchical {

/// Thrown by Leaders: a message between hosts did not come to its end.
struct HostFailure {
  enum class Kind { lost, late, alarmed } kind;
  int host = 0;      ///< The other one.
  std::string text;  ///< What the backend said of it.
};

/// Bytes under way to or from another host.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  int host = 0;
};
using Transfers = std::vector<Transfer>;

/// How the leaders of hosts exchange bytes: in messages, which between two hosts arrive in the
/// order in which they are posted; both sides post the same sizes. Memory must live until the
/// transfer has ended. One thread at a time.
class Leaders {
 public:
  using Clock = Watch::Clock;
  /// `backend`: of one rank a host, in the order of the hosts, with send and recv for CPU tensors.
  Leaders(c10::intrusive_ptr<c10d::Backend> backend, Alarm& alarm)
      : backend_(std::move(backend)), watch_(alarm) {}

  int host() const { return backend_->getRank(); }
  int hosts() const { return backend_->getSize(); }

  /// Appended to `transfers`; nothing is for 0 bytes. Do not block. Throw HostFailure.
  void send(int host, const std::byte* data, size_t bytes, Transfers& transfers);
  void receive(int host, std::byte* data, size_t bytes, Transfers& transfers);
  /// Waits for all and empties the list. Throws HostFailure.
  void finish(Transfers& transfers, Clock::time_point deadline);
  /// Ends what waits, now and later. Any thread.
  void interrupt() { watch_.interrupt(); }

 private:
  void post(bool sends, int host, std::byte* data, size_t bytes, Transfers& transfers);

  c10::intrusive_ptr<c10d::Backend> backend_;
  Watch watch_;
};

}  // namespace lockstep::hierarchical
