#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/tool/cli.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep::tool {

/// The flags of these groups of train_flags(). They write into `config`.
void add_flags(Cli& cli, RunConfig& config, const std::vector<std::string>& groups);

/// The file that --config names in `args`. Empty when there is none. Read before the flags, which
/// win.
std::string config_file_in(const std::vector<std::string>& args);

/// Starts `config.devices` processes where several are wanted and no launcher has started this one
/// as a rank. True in the parent, when all are done. What their rank 0 would check of the files is
/// checked first. A rank is what `run` does, called again in a fork of this process, or this
/// program where forks cannot go on (see launch::SpawnCall::body). `command` names it in errors.
bool spawn_ranks(const RunConfig& config, const std::string& command,
                 const std::function<int()>& run);
/// Threads and processors of this rank, as asked for or by this host's ranks. Before init().
void place_rank(const RunConfig& config);

}  // namespace lockstep::tool
