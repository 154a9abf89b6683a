#pragma once

#include <chrono>

#include "lockstep/base/file.h"
#include "lockstep/comm/rendezvous/job_environment.h"

namespace lockstep {

/// How the ranks of mpirun find the store when nobody has said where rank 0 listens. Rank 0 takes a
/// free port and tells the others. On one host it uses a file in mpirun's own temporary
/// folder, which mpirun removes. Else it uses MPI. Where there is neither, the port that all derive
/// from the job's number stands.
///
/// Sets `job.master_addr` and `job.master_port`. Returns rank 0's listening socket (none on the
/// others, and none where the port is the derived one). Blocks until rank 0 has told. Throws
/// TimeoutError when it does not, UsageError when there is no way to find out.
UniqueFd meet_under_mpirun(JobEnvironment& job, std::chrono::milliseconds timeout);

/// All ranks have met: rank 0 takes back what it told, as a later World of the same processes would
/// tell something else.
void forget_meeting(const JobEnvironment& job) noexcept;

}  // namespace lockstep
