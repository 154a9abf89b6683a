// Remote procedure calls: functions that run on other workers, references to what is there,
// distributed autograd and optimizers. See docs/rpc.md.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/rpc/autograd_context.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/distributed_optimizer.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/rpc/value.h"

namespace lockstep::rpc {

namespace detail {
class Worker;
}

struct Options {
  /// A call without an answer for this long fails with TimeoutError. PyTorch's default.
  std::chrono::milliseconds timeout{60'000};
  /// How long a graceful shutdown waits for the other workers. It is longer than a call's time-out,
  /// because a trainer may run long after a server has finished.
  std::chrono::milliseconds shutdown_timeout{600'000};
  /// How long shutdown waits for functions that still run here. Usually they end when their own
  /// calls fail. A thread cannot be stopped from outside, so one that runs longer is left running.
  std::chrono::milliseconds stop_timeout{10'000};
  /// Threads that run functions, not counting threads that wait for another worker. More are
  /// started as needed, so nested calls never deadlock. PyTorch's own default.
  int threads = 16;
  /// The most calls in flight. A further call waits until one of them is answered. Calls within
  /// functions do not wait, because others may wait for them. A call in flight takes some 1 KB and
  /// its arguments.
  int64_t max_pending = 16'384;
  /// Only workers with the same secret can call, and none can change what others send. At least 16
  /// characters. Empty: that of LOCKSTEP_RPC_SECRET, else none.
  std::string secret = {};
  /// Small calls between ranks bypass LibTorch's RPC, which takes a fraction of the time. False:
  /// all calls go through LibTorch's RPC, for example to measure it. If one rank sets false, it
  /// applies to all.
  bool fast_calls = true;
  /// Small calls use shared memory if all ranks are on one host and the job has no secret: up to
  /// 512 KiB per pair of ranks and direction. Otherwise they use TCP, with one connection per pair
  /// of ranks, including pairs on one host. False: always TCP. If one rank sets false, it applies
  /// to all.
  bool shared_memory = true;
  /// How LibTorch's RPC connects workers on one host. True: through its shared memory, where each
  /// worker polls without sleeping and so uses idle processor time. False: over loopback, where
  /// workers sleep and such a call takes twice as long. Rank 0's value applies to all workers,
  /// including those that join. On several hosts workers always sleep.
  bool poll = true;
};

/// This process as a worker: it answers calls from `init` until it is shut down. Movable. Its
/// destructor shuts down gracefully, or at once when an exception unwinds; it does not throw.
class Agent {
 public:
  explicit Agent(std::shared_ptr<detail::Worker> worker);
  ~Agent();
  Agent(Agent&&) noexcept = default;
  Agent& operator=(Agent&&) noexcept = default;

  const std::string& name() const;
  /// The group's address, for workers that `join` later. Empty for a group without a launcher's
  /// store, such as one process.
  const std::string& address() const;
  /// The names of the ranks in order, then of the workers that joined and have not left.
  std::vector<std::string> workers() const;

  /// Workers that died or left alone, and have not joined again. Calls to them fail with
  /// PeerLostError.
  std::vector<std::string> lost_workers() const;

  /// Graceful shutdown. A rank waits until all workers that are not lost have called shutdown and
  /// no call is in flight, then leaves. A worker that joined waits for its own calls only. Serves
  /// calls meanwhile. After Options::shutdown_timeout it leaves and throws TimeoutError, which
  /// names the workers that did not come. If functions still run here Options::stop_timeout later,
  /// it throws TimeoutError, which names them. Idempotent.
  void shutdown();
  /// Leaves at once. Pending calls fail, and those of others to this worker. Waits for running
  /// functions as `shutdown` does, and logs those that are left running.
  void shutdown_now() noexcept;

 private:
  std::shared_ptr<detail::Worker> worker_;
  int exceptions_ = std::uncaught_exceptions();
};

/// Makes this process the worker `name`, and waits until all ranks have done so. Keep the agent
/// until the last call, and let it go before the World. Throws:
/// - UsageError for a name that is empty, too long (128), or another worker's, for a secret that is
///   too short or not the others', and for a second agent in this process: LibTorch keeps the
///   references of the first,
/// - TimeoutError when ranks do not come within the World's time-out, or do not answer within
///   Options::timeout, at least a minute,
/// - CommError when a rank cannot connect to the others for small calls.
Agent init(const World& world, const std::string& name, const Options& options = {});

/// Makes this process a further worker of a group that `init` has made: it comes later, perhaps in
/// the place of one that died, whose name it may take. `address`: the group's, from Agent::address.
/// When this returns, the new worker and all others know each other. The references and objects of
/// a dead worker are lost: the new one starts without any.
///
/// If a process dies in this call while it connects, LibTorch's agent on other workers may stop
/// accepting connections, with a warning. Existing connections still work. Workers that join later
/// cannot reach such a worker.
///
/// The group's ranks shut down when those that joined have left. On one host a group talks over
/// shared memory or loopback: then workers join from that host only. Throws:
/// - UsageError for the name of a living worker, for an invalid address, and as `init`,
/// - TimeoutError or CommError when there is no such group,
/// - PeerLostError when no worker of the group is left,
/// - RemoteError when the group has another secret.
Agent join(const std::string& address, const std::string& name, const Options& options = {});

}  // namespace lockstep::rpc
