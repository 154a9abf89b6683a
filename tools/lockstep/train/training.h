#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/comm/world.h"
#include "lockstep/loggers/logger.h"
#include "lockstep/train/callback.h"
#include "tools/lockstep/train/console.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {

class ElasticJob;

/// How the process joins the job. Throws UsageError for an accelerator or backend that is not
/// there.
InitOptions init_options(const RunConfig& config);

/// Checks what is to be read and written, so that hours of training are not lost to a mistyped
/// name: that files and the checkpoint folder can be made (the folder is), that the folder holds no
/// other run's checkpoints, that what is to be resumed or loaded is there. Throws UsageError and
/// DataError naming the flag, and FolderInUseError. Returns the checkpoint folder, which is this
/// process's as long as the object lives.
CheckpointFolder check_files(const RunConfig& config);

/// What `lockstep train` does in a rank: loads the data, makes the model from the seed, resumes,
/// trains and saves. Prints the outcome as the last line of rank 0's standard output. Every rank
/// of `world` calls with the same configuration. See Trainer::fit for what it throws.
/// `job`: in which it lives on; may be null. `loggers`: empty at first, and kept by the caller from
/// one generation of the job to the next.
FitResult run_training(const RunConfig& config, const World& world, Console& console,
                       ElasticJob* job, std::vector<std::shared_ptr<Logger>>& loggers);

/// What `lockstep eval` does in a rank: the outcome of `config.load_weights` on the held-out part.
Metrics run_evaluation(const RunConfig& config, const World& world, Console& console);

}  // namespace lockstep
