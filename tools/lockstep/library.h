#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lockstep/launch/launcher.h"

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

/// What the launchers of the job's hosts tell each other, in the store at address and port; see
/// hosts_board.h. Loads LibTorch for it. Throws lockstep::Error.
std::shared_ptr<launch::OtherHosts> join_hosts(const std::string& address, uint16_t port, int host,
                                               int hosts);

}  // namespace lockstep::tool
