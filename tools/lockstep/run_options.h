#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/elastic/etcd_registry.h"
#include "lockstep/launch/program.h"

namespace lockstep::tool {

/// Some of a worker's streams.
struct Streams {
  bool out = false;
  bool err = false;
};

/// By local rank; those of -1 are for ranks that are not named.
using StreamMap = std::map<int, Streams>;
/// torchrun's numbers: "3", or "0:1,1:3" with nothing for those not named. Throws UsageError naming
/// `flag`.
StreamMap parse_streams(const std::string& flag, const std::string& text);
Streams streams_of(const StreamMap& map, int local_rank);

/// How the hosts of a job find each other: --rdzv-backend, --rdzv-conf and what goes with them.
struct MeetingOptions {
  enum class Backend {
    fixed,     ///< static: host 0 of a fixed number serves the registry of hosts.
    embedded,  ///< c10d: the host of the endpoint serves it.
    etcd,      ///< etcd has it.
  };
  Backend backend = Backend::fixed;
  elastic::EtcdRegistryOptions etcd = {};  ///< Its members, certificates and user.
  std::optional<bool> is_host = {};  ///< This host serves it; none: where the endpoint is here.
  std::chrono::milliseconds join_timeout{600'000};  ///< For MIN hosts to come. torchrun's.
  std::chrono::milliseconds last_call{300};  ///< After MIN have come: hosts start within moments.
  std::chrono::milliseconds keep_alive{2'000};  ///< A host that vanishes is noticed within it.
  std::string local_addr = {};  ///< Of this host for the others; empty: the way to the endpoint.
  std::filesystem::path token_file = {};  ///< Empty: the variable LOCKSTEP_TOKEN, or none.
};

/// What `lockstep run` was asked for, checked.
struct RunOptions {
  int nproc = 1;
  int nodes = 1;      ///< At most.
  int min_nodes = 1;  ///< The job runs with so many hosts, too.
  std::optional<int> node_rank = {};
  MeetingOptions meeting = {};
  std::string master_addr = "127.0.0.1";
  std::optional<uint16_t> master_port;  ///< None: any free one on a single host, else 29500.
  std::string run_id;
  std::string role = "default";
  std::string log_dir;             ///< Empty: none.
  std::string event_log = "null";  ///< Or "console"; see EventLog.
  StreamMap redirects;
  StreamMap tee;
  std::set<int> shown;  ///< --local-ranks-filter; empty: all.
  bool no_prefix = false;
  int stdin_rank = 0;  ///< Which rank has our standard input; -1: none.
  /// Lines that contain one of these words are copied into a file; empty: none.
  std::vector<std::string> out_filters, err_filters;
  /// LOCAL_RANK is 0 in every worker, and its own GPU the only one that it sees.
  bool virtual_local_rank = false;
  std::string bind_to = "auto";  ///< See launch::choose_binding.
  int max_restarts = 0;
  std::optional<std::chrono::milliseconds> shutdown_timeout;  ///< See launch::shutdown_timeout.
  std::vector<int> signals;
  std::string signal_names;  ///< As given, for the workers.
  launch::ProgramKind kind = launch::ProgramKind::guess;
  std::vector<std::string> program;  ///< With its arguments.
  /// What was asked for and has no effect, with the reason: torchrun's flags.
  std::vector<std::string> without_effect;

  /// Hosts agree on what to run. Else this one decides alone.
  bool has_meeting() const { return nodes > 1 || meeting.backend == MeetingOptions::Backend::etcd; }
};

/// None when --help was asked for and printed. Throws UsageError.
std::optional<RunOptions> parse_run_options(const std::vector<std::string>& args);

/// GPUs that CUDA would find here.
int count_gpus();

}  // namespace lockstep::tool
