#include "lockstep/comm/rendezvous/mpirun_meeting.h"

#include <filesystem>
#include <tuple>

#include "lockstep/base/error.h"
#include "lockstep/base/host_address.h"
#include "lockstep/base/poll_pause.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/backends/mpi/mpi.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

void take_endpoint(const std::string& text, JobEnvironment& job) {
  const auto told = parse_endpoint(text);
  if (!told) throw CommError("init: rank 0 told '" + text + "', expected HOST:PORT");
  std::tie(job.master_addr, job.master_port) = *told;
}

std::string endpoint(const std::string& host, const UniqueFd& socket) {
  return host + ":" + std::to_string(bound_port(socket.get()));
}

UniqueFd meet_by_file(JobEnvironment& job, std::chrono::milliseconds timeout) {
  if (job.rank == 0) {
    UniqueFd socket = listen_on("127.0.0.1", 0);
    const std::string told = endpoint("127.0.0.1", socket);
    write_file_atomically(job.meeting_file, told);
    take_endpoint(told, job);
    return socket;
  }
  const auto deadline = Clock::now() + timeout;
  std::error_code ignored;
  for (PollPause pause; !fs::exists(job.meeting_file, ignored); pause.sleep()) {
    if (Clock::now() < deadline) continue;
    throw TimeoutError("init: rank 0 has not told where it listens within " +
                           human_seconds(static_cast<double>(timeout.count()) / 1000) + " (" +
                           job.meeting_file + " does not appear)",
                       "did rank 0 start? Else set MASTER_ADDR and MASTER_PORT: mpirun -x");
  }
  take_endpoint(read_file(job.meeting_file), job);
  return {};
}

UniqueFd meet_by_mpi(JobEnvironment& job) {
  UniqueFd socket;
  std::string told;
  if (job.rank == 0) {
    socket = listen_on(job.single_host ? "127.0.0.1" : "", 0);
    const std::string host = job.master_addr.empty() ? outward_address() : job.master_addr;
    told = endpoint(host, socket);
  }
  take_endpoint(mpi::broadcast_from_first(told, job.rank, job.world_size), job);
  return socket;
}

}  // namespace

UniqueFd meet_under_mpirun(JobEnvironment& job, std::chrono::milliseconds timeout) {
  if (!job.meeting_file.empty() && fs::is_directory(fs::path(job.meeting_file).parent_path()))
    return meet_by_file(job, timeout);
  if (mpi::info().available) return meet_by_mpi(job);
  if (job.master_addr.empty()) {
    throw UsageError(
        "Open MPI's variables do not say on which host rank 0 runs, and this build of "
        "Lockstep has no MPI to ask",
        "mpirun -x MASTER_ADDR=HOST, with the host of rank 0; or install "
        "libopenmpi-dev and build again");
  }
  return {};
}

void forget_meeting(const JobEnvironment& job) noexcept {
  if (job.rank != 0 || job.meeting_file.empty()) return;
  std::error_code ignored;
  fs::remove(job.meeting_file, ignored);
}

}  // namespace lockstep
