#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/launch/host_agent.h"
#include "run_options.h"

namespace lockstep::tool {

/// What liblockstep_cli.so offers under a name (entry.h). Loads it, and LibTorch, first. Throws
/// lockstep::Error.
void* library_symbol(const char* name);
/// The same of liblockstep_bench.so. A process loads one of the two: each holds what it needs of
/// Lockstep.
void* bench_symbol(const char* name);

/// Serves a TCPStore on a bound and listening socket, whose descriptor it takes over, for as long
/// as the returned pointer lives. Loads LibTorch for it (0.2 s). Throws lockstep::Error.
std::shared_ptr<void> serve_store(int listen_fd);

/// This host's part in a job of several; see job_host.cpp. Loads LibTorch for the store. Throws
/// lockstep::Error.
std::shared_ptr<launch::HostAgent> join_job(const RunOptions& options);

}  // namespace lockstep::tool
