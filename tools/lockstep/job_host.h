#pragma once

#include <memory>

#include "lockstep/launch/host_agent.h"
#include "run_options.h"

namespace lockstep::tool {

/// Joins a job of several hosts (RunOptions::has_meeting), and serves the registry by which they
/// agree where that is this host's to do. Throws UsageError for settings that cannot be, CommError
/// where the registry's port is taken.
std::unique_ptr<launch::HostAgent> join_job_of_hosts(const RunOptions& options);

}  // namespace lockstep::tool
