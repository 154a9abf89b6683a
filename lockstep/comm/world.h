#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/backends/mpi/mpi_communicator.h"
#include "lockstep/comm/checks/observed_call.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/comm/store.h"

namespace torch::nn {
class Module;
}

namespace lockstep {

struct InitOptions {
  /// nccl, shm, hierarchical, gloo, mpi or auto. auto takes the first of these that fits:
  /// - gloo when Python's ranks are among the job's,
  /// - nccl when every rank has a CUDA device of its own,
  /// - shm when all ranks are on one host,
  /// - hierarchical when there are several hosts and some has several ranks,
  /// - gloo.
  /// Ranks are on one host when they can share memory: see docs/hosts.md.
  std::string backend = "auto";
  /// auto then takes no device into account: the tensors will be on the CPU.
  bool cpu_only = false;
  /// env://, tcp://host:port or file:///path; env:// reads torchrun's variables, else Slurm's, else
  /// Open MPI's or another MPI launcher's, else makes a group of one.
  std::string init_method = "env://";
  int rank = -1;        ///< -1: from the URL (tcp://host:port?rank=0&world_size=2) or environment.
  int world_size = -1;  ///< Likewise.
  /// Meet over this store in place of an init method; `rank` and `world_size` must then be given.
  /// It must outlive every World over it, so hold it in a process that no rank's end takes along.
  /// The World has its own connection to a TCP store. Empty: as `init_method` says.
  Store store = {};
  /// The ranks are those of this MPI_Comm of the program's own, in place of an init method, whoever
  /// started them: docs/mpi.md. The program has started MPI, and ends it after the World. All ranks
  /// of the communicator call. A World over it may follow another one. backend "mpi" needs
  /// MPI_THREAD_MULTIPLE, the others any thread level, with `init` and `close` on a thread that may
  /// call MPI. None: as `init_method` says.
  MpiCommunicator mpi_communicator = {};
  /// Which World over one store this is. All its ranks give the same number, and a later World a
  /// greater one: see `init`. -1: how often torchrun has restarted the job's ranks, else 0.
  int64_t generation = -1;
  /// Every collective and the meeting itself give up after this long. None: LOCKSTEP_TIMEOUT
  /// (seconds), else two minutes. PyTorch waits 30. A person at a terminal wants to know sooner.
  /// From a millisecond to a million seconds (11 days).
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Asked while a group forms, every 50 ms, with more than 32 ranks every 500. When it says true,
  /// the wait for ranks ends by a PeerLostError: a later generation has begun without one of them.
  /// So do calls of gloo and hierarchical that wait, within 0.3 s. Any thread asks. Empty: nobody.
  std::function<bool()> cancelled = {};
  /// Gloo: the network interface to use ("eth0"); empty: GLOO_SOCKET_IFNAME, else loopback for a
  /// group on one host, else the one that reaches the master.
  std::string interface = {};
  /// None: LOCKSTEP_DEBUG=off|info|detail, else TORCH_DISTRIBUTED_DEBUG, else info.
  std::optional<DebugLevel> debug = {};
  /// malloc keeps what this process frees, as the next training step asks for it again: up to a
  /// fourth less time per step. In return the process holds on to the most that it ever had. Set
  /// it to false for a program that must give memory back. Nothing is changed where the user has
  /// chosen by MALLOC_* or GLIBC_TUNABLES, or malloc is not glibc's.
  bool keep_freed_memory = true;
};

/// The processes of one job, as `init()` found them. Owns the default group and the store. Closes
/// them in order, on every rank, at `close()` or destruction. Keep it alive until the last
/// communication, and let it go before `main` ends. Movable, not copyable. One thread at a time.
///
/// A fork without exec must not use it, its groups or its store, and ends by `_exit` or exec.
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
  /// "torchrun", "lockstep", "slurm", "openmpi", "mpich" and others of read_job_environment, "mpi"
  /// (a communicator), "explicit" or "none".
  const std::string& launcher() const;
  int64_t generation() const;
  /// `cuda:LOCAL_RANK` with nccl, else cpu.
  c10::Device device() const;
  /// This host's address in numbers, as the job's other hosts reach it. "127.0.0.1" where the
  /// launcher says that there is one host.
  const std::string& address() const;
  /// For `store_of_job`, in another process: where the job's store is. Empty where that is in a
  /// file or within this process: init method file://, or a job of one without a launcher.
  const std::string& store_address() const;
  const ProcessGroup& group() const;
  /// The job's store, under a prefix for the program's own keys.
  const Store& store() const;
  /// Every rank of the job calls with the same list and backend. Ranks not in it get a null handle
  /// and wait for nobody. The group's ranks are in ascending order, as PyTorch's. Python ranks that
  /// call new_group with the same list join. Blocks and throws as `init`. Its MismatchError has in
  /// `failure().ranks` two ranks that differ, each with the list that it gave (`asked_group`).
  ///
  /// `use_local_synchronization`, as in PyTorch: only the ranks in the list call. Calls by other
  /// ranks count for nothing. All members give it, and make their groups of one list in the same
  /// order. Python's ranks cannot join.
  ProcessGroup new_group(const std::vector<int>& ranks, const std::string& backend = {},
                         bool use_local_synchronization = false) const;
  /// Throws MismatchError on every rank unless all have the same parameters and buffers. It names
  /// the first that differs, and the ranks: `failure().detail` and `.ranks`. Differences no greater
  /// than rounding are a warning. DistributedDataParallel and GradientAverager compare parameters
  /// by themselves: it is for loops without them, and before a save. The statistics of batch norm
  /// differ while each rank has its own. Every rank of the job calls.
  void check_equal(const torch::nn::Module& module) const;
  /// Closes the groups, the youngest first, then the store. The rank that holds the store waits up
  /// to 5 s for the others' last use of it. Nobody else waits. When an exception unwinds, nobody
  /// waits for others. What is in flight is finished first, or given up when unwinding. A store
  /// whose process stands still holds this up for the time-out at most. Idempotent.
  void close() noexcept;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Joins the job. Blocks until all ranks have come or the time-out passes. Throws:
/// - UsageError for a bad environment or options: a rank out of range or given twice, launchers'
///   variables that contradict each other,
/// - MismatchError when ranks were told to use different backends,
/// - TimeoutError naming the missing ranks and the address,
/// - PeerLostError where a rank that had come was lost, or the process that holds the store,
/// - CommError.
/// One World at a time. Another one may follow a closed one, also one that failed: over the same
/// store with a greater `generation`, with other members and another rank, or over a new store.
/// Each generation has keys of its own, so nothing of an earlier one is taken for its own. When a
/// generation has formed, its rank 0 deletes the keys of earlier ones. A rank that is late and
/// still in one of those gets an error. What was made over the former World (groups, DDP,
/// samplers, ...) is made anew over the module that lives on, and must go first. Python's ranks can
/// be members of generation 0 only. mpi starts once in a process: it has one World, unless the
/// program has started MPI.
World init(const InitOptions& options = {});

/// The keys of a job's World::store(), for a process that is none of its ranks. `address`: what
/// World::store_address() gave there. Connects within `timeout`, and waits as long by default.
/// Throws UsageError for what is no such address, else as `tcp_store`.
Store store_of_job(const std::string& address, std::chrono::milliseconds timeout);

}  // namespace lockstep
