#pragma once

#include <string>

#include "lockstep/comm/backends/mpi/mpi_communicator.h"
#include "lockstep/comm/rendezvous/job_environment.h"
#include "lockstep/comm/store.h"

namespace lockstep {

/// How the ranks of a job meet: this process's place in the job, and by what the ranks exchange
/// addresses.
struct Rendezvous {
  JobEnvironment job;
  enum class Kind { none, tcp, file } kind = Kind::none;
  std::string path;    ///< Of the file.
  int listen_fd = -1;  ///< Rank 0: a socket that listens already; `open_store` takes it over.
};

/// Reads the init method, the caller's own rank and size (-1: not said) and the environment.
/// Connects to nothing. See InitOptions. Throws UsageError.
Rendezvous plan_rendezvous(const std::string& init_method, int asked_rank, int asked_size,
                           const Lookup& lookup);

/// The same where the ranks meet over a store that the caller has. Which ranks share a host is
/// found out: the environment may be of another generation. Throws UsageError.
Rendezvous plan_over_store(const Store& store, int rank, int world_size);

/// The same where the program has handed in a communicator of MPI, for the backend mpi or another.
/// Blocks until all its ranks call. Throws as mpi::use.
Rendezvous plan_over_mpi(const MpiCommunicator& communicator, std::chrono::milliseconds timeout,
                         bool for_backend);

/// Where the launcher did not say at what address rank 0 listens (mpirun), finds it out: sets the
/// job's master and, on rank 0, `listen_fd`. Rank 0 takes a free port and tells the others. On one
/// host it does so by a file in mpirun's own temporary folder, which mpirun removes, else by MPI.
/// Blocks until it has told. Throws TimeoutError when it does not, UsageError when there is no way
/// to find out. Else does nothing.
void find_master(Rendezvous& plan, std::chrono::milliseconds timeout);

/// All ranks have met: rank 0 takes back what it told, as a later World of the same processes would
/// tell something else.
void forget_meeting(const JobEnvironment& job) noexcept;

/// Makes or joins the store. Rank 0 listens, unless the launcher does. Throws as tcp_store does.
Store open_store(const Rendezvous& plan, std::chrono::milliseconds timeout);

/// True when this process is the one that holds the store for the others.
bool holds_store(const Rendezvous& plan);

}  // namespace lockstep
