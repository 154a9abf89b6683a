// Remote procedure calls: functions that run on other workers, references to what is there,
// distributed autograd and optimizers. See docs/rpc.md.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/rpc/autograd_context.h"
#include "lockstep/rpc/batched.h"
#include "lockstep/rpc/call.h"
#include "lockstep/rpc/distributed_optimizer.h"
#include "lockstep/rpc/function.h"
#include "lockstep/rpc/future.h"
#include "lockstep/rpc/rref.h"
#include "lockstep/rpc/value.h"

namespace lockstep::rpc {

struct Options {
  /// A call without an answer for so long fails by TimeoutError. PyTorch's own default.
  std::chrono::milliseconds timeout{60'000};
  /// How long a graceful shutdown waits for the others. A trainer may go on for long after a server
  /// has nothing left to do, so this is longer than a call's.
  std::chrono::milliseconds shutdown_timeout{600'000};
  /// How long leaving waits for functions that still run here: as a rule they end when their own
  /// calls fail. A thread cannot be ended from outside, so one that runs longer is left behind.
  std::chrono::milliseconds stop_timeout{10'000};
  /// Threads that run functions while none of them waits for another worker. More are started as
  /// needed: no nesting of calls locks up. PyTorch's own default.
  int threads = 16;
  /// A call beyond so many that are under way waits until one of them is answered. Calls within
  /// functions do not wait, as others may wait for them. One takes some 1 KB and its arguments.
  int64_t max_pending = 16'384;
  /// A worker refuses calls beyond so many that it has not answered: those of several callers that
  /// each keep to `max_pending`.
  int64_t max_served = 65'536;
  /// A call within so many others is refused. Each holds a thread: a function that calls itself
  /// without end fails before the machine has none left.
  int64_t max_call_depth = 2'048;
  /// A message with more bytes is refused, by its sender and by its receiver: as many as a billion
  /// weights of float32. What is larger is a mistake, or travels in parts.
  int64_t max_message_bytes = int64_t{1} << 32;
  /// Lists within lists deeper than this are refused: no type that a program writes down is.
  int max_depth = 64;
  /// Only workers with the same secret can call, and none can change what others send. At least 16
  /// characters. Empty: that of LOCKSTEP_RPC_SECRET, else none.
  std::string secret = {};
  /// Small calls between ranks go a way of their own, which takes a fraction of the time. False:
  /// all go LibTorch's way, say to measure that. One rank's false counts for all.
  bool fast_calls = true;
  /// They go over shared memory, if all ranks are of one host and the job has no secret: up to 256
  /// KiB for each two ranks and direction. Else over TCP, by one connection for each two ranks,
  /// also for those that share a host. False: over TCP anyway. One rank's false counts for all.
  bool shared_memory = true;
  /// What goes LibTorch's way between workers of one host: over its shared memory, where each
  /// worker looks for messages without ever sleeping, and takes what a processor has to spare.
  /// False: over loopback, where workers sleep, and such a call takes twice as long. Rank 0's
  /// choice holds for all, and for those that join. Over several hosts they always sleep.
  bool poll = true;
};

/// This process as a worker: it answers calls from `init` until it is shut down. Movable. Its
/// destructor shuts down gracefully, or at once when an exception unwinds; it does not throw.
class Agent {
 public:
  class Impl;
  explicit Agent(std::unique_ptr<Impl> impl);
  ~Agent();
  Agent(Agent&&) noexcept;
  Agent& operator=(Agent&&) noexcept;

  const std::string& name() const;
  /// For workers that `join` later: where the group meets. Empty for a group without a launcher's
  /// store, such as one process.
  const std::string& address() const;
  /// The ranks, in their order, then those that joined and are here.
  std::vector<std::string> workers() const;

  /// Those that died or left without the others, and have not joined again. Calls to them fail by
  /// PeerLostError.
  std::vector<std::string> lost_workers() const;

  /// A rank waits until all workers that are not lost have come here and no call is under way, then
  /// leaves. A worker that joined waits for its own calls only. Serves calls meanwhile. Throws
  /// TimeoutError, with those that have not come, after Options::shutdown_timeout, and has then
  /// left as well. Throws TimeoutError, with the functions, when some still run here
  /// Options::stop_timeout later. Idempotent.
  void shutdown();
  /// Leaves at once. Pending calls fail, and those of others to this worker. Functions that run
  /// here are waited for as by `shutdown`; those that were left behind are logged.
  void shutdown_now() noexcept;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Makes this process the worker `name`, and waits until all ranks have done so. Keep the agent
/// until the last call, and let it go before the World. Throws:
/// - UsageError for a name that is empty, too long (128), or another worker's, for a secret that is
///   too short or not the others', and for a second agent in this process: LibTorch keeps the
///   references of the first,
/// - TimeoutError when ranks do not come within the World's time-out, or do not answer within
///   Options::timeout, at least a minute.
Agent init(const World& world, const std::string& name, const Options& options = {});

/// Makes this process a further worker of a group that `init` has made: it comes later, perhaps in
/// the place of one that died, whose name it may take. `address`: the group's, from Agent::address.
/// All that are there know it when this returns, and it them. A dead worker's references and
/// objects are gone: the new one starts with none.
///
/// A process that dies in this call, while it connects, may leave workers deaf: LibTorch's agent
/// accepts no connection after that, and warns of it. Those that are connected go on. Further ones
/// cannot reach such a worker.
///
/// The group's ranks shut down when those that joined have left. On one host a group talks over
/// shared memory or loopback: then workers join from that host only. Throws:
/// - UsageError for a name that a living worker has, for what is no address, and as `init`,
/// - TimeoutError or CommError when there is no such group,
/// - PeerLostError when nobody is there any more,
/// - RemoteError when the group has another secret.
Agent join(const std::string& address, const std::string& name, const Options& options = {});

}  // namespace lockstep::rpc
