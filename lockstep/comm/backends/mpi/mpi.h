#pragma once

#include <chrono>
#include <string>

#include "lockstep/comm/backends/backend.h"
#include "lockstep/comm/backends/mpi/mpi_communicator.h"

/// MPI as a backend, and as a means by which the ranks of mpirun find each other. Built where CMake
/// finds an MPI. mpi_absent.cpp stands in elsewhere.
///
/// MPI is the process's, not an object's: it starts once, with the first call that needs it, and
/// ends once. One thread of ours makes all MPI calls (see mpi_engine.h), so any thread may call
/// here.
namespace lockstep::mpi {

inline constexpr BackendTraits kTraits{.takes_strided = true, .needs_comparison = true};

BackendInfo info();

/// CPU tensors. The group's ranks must be those of mpirun: `global_ranks` are ranks of
/// MPI_COMM_WORLD. Blocks until all members have come to `store`, then makes the communicator.
/// Throws UsageError where the process was not started by mpirun or by another MPI's.
MadeBackend make(const BackendOptions& options);

/// "Open MPI 4.1.4"; empty where this build has no MPI. Does not start MPI.
std::string version();

/// A process's place among the ranks of a communicator.
struct Place {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  ///< Of those that share memory with it.
};

/// From now on, until `end`, the job's ranks are those of the communicator, by a duplicate of it.
/// All its ranks call, on a thread that may call MPI. Throws UsageError where the program's MPI is
/// not running, or `for_backend` not with MPI_THREAD_MULTIPLE, or this build has none. Throws
/// TimeoutError where a rank does not come.
Place use(const MpiCommunicator& communicator, std::chrono::milliseconds timeout, bool for_backend);

/// Rank 0's text on every rank of the job. All ranks call. Starts MPI unless `use` was given
/// a communicator. `rank` and `size`: what the
/// launcher's variables say, for the check that MPI says the same. Throws as `make`.
std::string broadcast_from_first(const std::string& text, int rank, int size);

/// Lets go of what `use` was given, and ends MPI if it was started here: MPI_Finalize, which waits
/// for the other ranks. `failing`: this rank has failed and will end with an exit code that is not
/// 0. Then it waits for nobody, and mpirun ends the others. Nothing of `make` may be used after it.
void end(bool failing) noexcept;

}  // namespace lockstep::mpi
