#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/socket.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/job.h"

namespace lockstep::launch {

/// The ranks of one job that this host runs, in torchrun's terms.
struct RankLayout {
  int local_size = 1;  ///< Ranks on this host.
  int first_rank = 0;  ///< The first one's rank in the job.
  int world_size = 1;  ///< Ranks on all hosts.
  int node_rank = 0;   ///< This host's number.
  int nodes = 1;       ///< Hosts.
  std::string master_addr = "127.0.0.1";
  uint16_t master_port = 0;
  std::string port_setting = ListenOptions().port_setting;  ///< What has set the port.
  /// The launcher serves the store: rank 0 connects to it like the others. Off: rank 0 listens.
  bool agent_store = true;
  std::string run_id = "none";
  std::string role = "default";
  int restart_count = 0;  ///< How often the launcher has started the ranks again.
  int max_restarts = 0;
  std::string token = random_hex(8);  ///< See kTokenVariable.
};

/// As resolve_host, but a name that is unknown is told at once.
std::vector<ResolvedAddress> resolve_at_once(const std::string& host);

/// Listens where the ranks of `layout` look for the store, and fills in the port where it is 0.
/// That is before anyone is told of the port, so that it is not raced for. Where: see
/// listen_as_master. A name that is unknown is told at once, as a person at a terminal waits.
/// `resolve` is for tests. Throws as listen_on.
UniqueFd listen_for_ranks(RankLayout& layout, const Resolver& resolve = resolve_at_once);

/// The launcher's variables for one rank: those of torchrun, the run's token, and what nobody has
/// chosen: OMP_NUM_THREADS, and how OpenMP's threads wait (see omp_waiting.h).
std::vector<std::pair<std::string, std::string>> rank_environment(const RankLayout& layout,
                                                                  int local_rank,
                                                                  const std::string& error_file);

/// Makes room for the open files and sockets of the launcher and of its ranks, which inherit the
/// limit: too few are told before anything is started, and once. See make_room_for_descriptors.
void make_room_for_ranks(const RankLayout& layout);

/// Between telling workers to end and killing them. Where `said` is none, the seconds of torchrun's
/// variable count, else the defaults. Throws UsageError for a variable that is no number of
/// seconds.
Job::Options job_options(std::optional<std::chrono::milliseconds> said);
inline constexpr const char* kShutdownVariable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT";

}  // namespace lockstep::launch
