#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/launch/program.h"

namespace lockstep::tool {

/// Which of a worker's streams: torchrun's numbers.
struct Streams {
  bool out = false;
  bool err = false;
};

/// For every local rank: "3", or "0:1,1:3" with nothing for those not named.
class StreamMap {
 public:
  /// Throws UsageError naming `flag`.
  static StreamMap parse(const std::string& flag, const std::string& text);
  Streams of(int local_rank) const;
  /// The largest local rank that is named; -1: none is.
  int largest() const;

 private:
  std::optional<Streams> all_;
  std::vector<std::pair<int, Streams>> single_;
};

/// What `lockstep run` was asked for, checked.
struct RunOptions {
  int nproc = 1;
  int nodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  std::optional<uint16_t> master_port;  ///< None: any free one on a single host, else 29500.
  std::string run_id;
  std::string role = "default";
  std::string log_dir;  ///< Empty: none.
  StreamMap redirects;
  StreamMap tee;
  std::set<int> shown;  ///< --local-ranks-filter; empty: all.
  bool no_prefix = false;
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
};

/// None when --help was asked for and printed. Throws UsageError.
std::optional<RunOptions> parse_run_options(const std::vector<std::string>& args);

/// GPUs that CUDA would find here.
int count_gpus();

}  // namespace lockstep::tool
