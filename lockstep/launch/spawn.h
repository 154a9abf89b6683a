#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

struct SpawnOptions {
  /// The program's arguments after argv[0]; empty: those this process was started with.
  std::vector<std::string> args;
  /// The first rank's number and the world's size when several hosts spawn into one job; -1: 0 and
  /// nprocs.
  int first_rank = -1;
  int world_size = -1;
  /// Where rank 0 listens; empty and 0: MASTER_ADDR and MASTER_PORT, else a socket on loopback that
  /// this process binds and serves itself, so that no port is raced for.
  std::string master_addr;
  int master_port = 0;
  /// How long the others get to end after TERM when one has failed, before KILL.
  std::chrono::milliseconds grace{900};
};

/// Starts `nprocs` copies of this program (fork, then exec of /proc/self/exe) with the launcher's
/// variables set, and waits for them: what torch.multiprocessing.spawn is in Python, for programs
/// whose `main` runs again in every worker.
///
///     if (lockstep::spawn(2)) return 0;  // the parent: every rank is done
///     auto world = lockstep::init();     // a worker
///
/// Returns true in the parent, after all workers ended with 0, and false at once in a worker (or
/// when a launcher such as torchrun has already started this process as a rank). When a worker
/// fails, the others get TERM, then KILL, and the first failure is rethrown here as a WorkerError
/// with the rank, how it ended and its last lines of standard error. INT, TERM and HUP are
/// forwarded and end in InterruptedError. No worker outlives this process, even when it is killed
/// with -9.
bool spawn(int nprocs, const SpawnOptions& options = {});

/// The same with the work in a function of the local rank: it runs in the worker, which then exits
/// (0, or the error's exit code) without returning from this call.
void spawn(const std::function<void(int local_rank)>& worker, int nprocs,
           const SpawnOptions& options = {});

}  // namespace lockstep
