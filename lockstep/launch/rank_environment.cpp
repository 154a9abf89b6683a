#include "lockstep/launch/rank_environment.h"

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/descriptors.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/base/words.h"
#include "lockstep/launch/omp_waiting.h"
#include "lockstep/launch/variables.h"

namespace lockstep::launch {

std::vector<ResolvedAddress> resolve_at_once(const std::string& host) {
  // A name server that does not answer at once is slow; one that is silent for longer is not there.
  return resolve_host(host, std::chrono::seconds(2), std::chrono::milliseconds(0));
}

UniqueFd listen_for_ranks(RankLayout& layout, const Resolver& resolve) {
  const bool one_host = layout.nodes == 1;
  // Else nobody but the ranks would tell that the name is mistyped, and later.
  if (!one_host) resolve(layout.master_addr);
  ListenOptions options;
  options.resolve = resolve;
  options.else_all = true;
  options.port_setting = layout.port_setting;
  UniqueFd listener = listen_as_master(layout.master_addr, layout.master_port, one_host, options);
  layout.master_port = bound_port(listener.get());
  return listener;
}

std::vector<std::pair<std::string, std::string>> rank_environment(const RankLayout& layout,
                                                                  int local_rank,
                                                                  const std::string& error_file) {
  const auto rank = std::to_string(layout.first_rank + local_rank);
  const auto world = std::to_string(layout.world_size);
  std::vector<std::pair<std::string, std::string>> env = {
      {"RANK", rank},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", world},
      {"LOCAL_WORLD_SIZE", std::to_string(layout.local_size)},
      {"GROUP_RANK", std::to_string(layout.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(layout.nodes)},
      {"ROLE_RANK", rank},
      {"ROLE_NAME", layout.role},
      {"ROLE_WORLD_SIZE", world},
      {"MASTER_ADDR", layout.master_addr},
      {"MASTER_PORT", std::to_string(layout.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(layout.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(layout.max_restarts)},
      {"TORCHELASTIC_RUN_ID", layout.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", layout.agent_store ? "True" : "False"},
      {kErrorFileVariable, error_file},
      {kTokenVariable, layout.token},
  };
  if (!env_string("TORCH_NCCL_ASYNC_ERROR_HANDLING")) {
    env.emplace_back("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  }
  if (layout.local_size > 1 && !std::getenv("OMP_NUM_THREADS")) {
    env.emplace_back("OMP_NUM_THREADS", "1");
    env.emplace_back(kThreadsByLauncherVariable, "1");
  }
  if (const auto waiting = omp_waiting()) env.push_back(*waiting);
  return env;
}

void make_room_for_ranks(const RankLayout& layout) {
  // Counted on running jobs of 2 to 8 ranks over each backend, and a little more.
  constexpr int kOfALauncher = 20, kOfARank = 12;
  constexpr int kStreams = 4;      // A rank's pipes and log files.
  constexpr int kConnections = 2;  // Of a rank, to the store; also the other ends of its pipes.
  const bool serves = layout.agent_store && layout.node_rank == 0;
  const int served = serves ? layout.world_size : layout.local_size;
  const int launcher = kOfALauncher + layout.local_size * kStreams + served * kConnections;
  make_room_for_descriptors(std::max(launcher, kOfARank + layout.world_size),
                            "cannot start " + counted(layout.local_size, "rank"));
}

Job::Options job_options(std::optional<std::chrono::milliseconds> said) {
  if (const auto text = env_string(kShutdownVariable); text && !said) {
    const auto seconds = parse_double(*text);
    if (!seconds || !(*seconds >= 0 && *seconds <= 86400)) {
      throw UsageError("environment variable " + std::string(kShutdownVariable) + "='" + *text +
                       "': expected seconds from 0 to 86400");
    }
    said = std::chrono::milliseconds(static_cast<int64_t>(*seconds * 1000));
  }
  return said ? Job::Options{.grace = *said, .signal_grace = *said} : Job::Options{};
}

}  // namespace lockstep::launch
