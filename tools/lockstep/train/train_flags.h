#pragma once

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/world.h"
#include "lockstep/tool/cli.h"
#include "tools/lockstep/train/console.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {
class ElasticJob;
}

namespace lockstep::tool {

/// Puts a number in the place of --devices auto, and checks the configuration: check_config.
void finish_config(RunConfig& config);

/// Where ranks that live on may have lost a part of the state with another one, they go on from a
/// snapshot: asks for some if `config` asks for none.
void choose_snapshots(RunConfig& config);

/// Runs `body` in each rank of the job that `config` asks for, and gives the command's exit code.
/// Starts `config.devices` processes where several are wanted and no launcher has started this one
/// as a rank. What their rank 0 would check of the files is checked first. A rank is what `again`
/// does, called again in a fork of this process, or this program where forks cannot go on (see
/// launch::SpawnCall::body). `command` names it in errors. Where ranks of `lockstep train` live on
/// after another's failure, `body` is called for each generation, with the job; else that is null.
int run_ranks(const RunConfig& config, const std::string& command,
              const std::function<int()>& again,
              const std::function<void(const World&, Console&, ElasticJob*)>& body);

}  // namespace lockstep::tool
