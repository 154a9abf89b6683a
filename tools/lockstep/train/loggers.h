#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/loggers/logger.h"
#include "tools/lockstep/train/run_config.h"

namespace lockstep {

/// On rank 0: the loggers that the flags ask for.
std::vector<std::shared_ptr<Logger>> make_loggers(const RunConfig& config);

/// Of --logger jsonl; empty without it.
std::string json_lines_path(const RunConfig& config);

/// Makes --log-dir. Throws UsageError naming the flag where it cannot be written.
void check_log_dir(const RunConfig& config);

}  // namespace lockstep
