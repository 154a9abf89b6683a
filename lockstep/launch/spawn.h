#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace lockstep {

struct SpawnOptions {
  /// The program's arguments after argv[0]; empty: those this process was started with.
  std::vector<std::string> args = {};
  /// The first rank's number and the world's size when several hosts spawn into one job; -1: 0 and
  /// nprocs.
  int first_rank = -1;
  int world_size = -1;
  /// Where the ranks meet. Empty and 0: MASTER_ADDR and MASTER_PORT, else loopback and any free
  /// port. For the ranks of a single host MASTER_ADDR does not count where it stands alone or is no
  /// address of this host: it is left over. There this process binds the socket and serves the
  /// store itself, so that no port is raced for. Several hosts need both, and rank 0 serves the
  /// store there (as in Python's env://).
  std::string master_addr = {};
  int master_port = 0;
  /// What the program's user changes where that port is taken, as the hint of the error has it:
  /// "--port". Empty: MASTER_PORT or this structure.
  std::string master_port_flag = {};
  /// How often all start again after one has failed, as with `lockstep run --max-restarts`. On a
  /// single host. 0: nobody has said that the program goes on from where it was.
  int max_restarts = 0;
  /// How long workers get to end before KILL, after a failure of another one and after a signal to
  /// this process. None: TORCH_ELASTIC_SHUTDOWN_TIMEOUT says so, or else 0.8 s after a failure, so
  /// that all are gone within a second, and 30 s after a signal, so that they can save their work.
  std::optional<std::chrono::milliseconds> shutdown_timeout = {};
  /// Local ranks whose standard output is shown, where `lockstep run` has --local-ranks-filter.
  /// What the others write is read and dropped. None: that of all. Standard error is always shown.
  std::optional<std::set<int>> stdout_ranks = {};
};

/// Starts `nprocs` copies of this program (fork, then exec of this executable) with the launcher's
/// variables set, and waits for them. It is what torch.multiprocessing.spawn is in Python, for
/// programs whose `main` runs again in every worker.
///
///     if (lockstep::spawn(2)) return 0;  // the parent: every rank is done
///     auto world = lockstep::init();     // a worker
///
/// `start` (start.h) is both in one line, for programs that catch nothing.
///
/// Returns true in the parent, after all workers ended with 0, and false at once in a worker, or
/// when a launcher (torchrun, `lockstep run`, srun, mpirun) has already started this process as a
/// rank. The shell of a Slurm allocation (sbatch, salloc) is no rank, nor is the only task of a
/// step: there it starts workers, and says so. A program may spawn several times, one after the
/// other: the workers of a later call pass by the earlier ones with true. A worker that spawns once
/// more gets a UsageError.
///
/// Workers have our standard output (see `stdout_ranks`), and /dev/null as standard input. Their
/// standard error passes through this process. OMP_NUM_THREADS is 1 in them where it is unset and
/// nprocs is over 1.
///
/// When a worker fails, the others get TERM, then KILL. Then all start again, where `max_restarts`
/// allows it and it can help. The last attempt's first failure is rethrown here as a WorkerError
/// with the rank, how it ended and its last lines of standard error. INT, TERM, HUP and QUIT are
/// forwarded and end in InterruptedError, after `shutdown_timeout` or at the second signal. USR1
/// and USR2 are forwarded and end nothing. No worker outlives this process, even when it is killed
/// with -9.
///
/// Blocks. One call at a time in a process.
bool spawn(int nprocs, const SpawnOptions& options = {});

/// The same with the work in a function of the local rank. It runs in the worker. The worker then
/// exits (0, or the error's exit code) without returning from this call.
void spawn(const std::function<void(int local_rank)>& worker, int nprocs,
           const SpawnOptions& options = {});

}  // namespace lockstep
