#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/debug_level.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/store.h"

namespace lockstep {

struct InitOptions {
  /// gloo, nccl, or auto: nccl when every rank has a CUDA device of its own, else gloo.
  std::string backend = "auto";
  /// env://, tcp://host:port or file:///path; env:// reads torchrun's variables, else Slurm's, else
  /// Open MPI's, else makes a group of one.
  std::string init_method = "env://";
  int rank = -1;        ///< For tcp:// and file://; -1: from the environment.
  int world_size = -1;  ///< Likewise.
  /// Every collective and the meeting itself give up after this long. PyTorch waits 30 minutes; a
  /// person at a terminal wants to know sooner. LOCKSTEP_TIMEOUT (seconds) overrides this default.
  std::chrono::milliseconds timeout{120'000};
  /// Gloo: the network interface to use ("eth0"); empty: GLOO_SOCKET_IFNAME, else loopback for a
  /// group on one host, else the one that reaches the master.
  std::string interface = {};
  /// LOCKSTEP_DEBUG=off|info|detail (else TORCH_DISTRIBUTED_DEBUG) overrides this default.
  DebugLevel debug = DebugLevel::info;
};

/// The processes of one job, as `init()` found them. Owns the default group and the store and closes
/// them in order, on every rank, at `close()` or destruction: keep it alive until the last
/// communication, and let it go before `main` ends. Movable, not copyable.
class World {
 public:
  class Impl;
  explicit World(std::unique_ptr<Impl> impl);
  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  int node_rank() const;
  /// "torchrun", "lockstep", "slurm", "openmpi", "explicit" or "none".
  const std::string& launcher() const;
  /// cuda:<local_rank> with nccl, else cpu.
  c10::Device device() const;
  const ProcessGroup& group() const;
  const Store& store() const;
  /// Every rank calls with the same list; ranks not in it get a null handle.
  ProcessGroup new_group(const std::vector<int>& ranks, const std::string& backend = {}) const;
  /// Waits for nobody: a rank that fails may close while the others are still at work. Idempotent.
  void close() noexcept;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Joins the job. Blocks until all ranks have come or the time-out passes. Throws UsageError for a
/// bad environment or options (a rank out of range, launchers' variables that contradict each
/// other), TimeoutError (who is missing, which address) and CommError. Once a process.
World init(const InitOptions& options = {});

}  // namespace lockstep
