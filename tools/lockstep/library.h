#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep::tool {

/// Runs a subcommand that lives in liblockstep_cli.so: its name and what follows. Returns its exit
/// code.
int run_from_library(const std::vector<std::string>& words);

/// Serves a TCPStore on a bound and listening socket, whose descriptor it takes over, for as long
/// as the returned pointer lives. Loads LibTorch for it (0.2 s). Throws lockstep::Error.
std::shared_ptr<void> serve_store(int listen_fd);

/// Adds to the number of hosts whose workers have ended, which the store of a job keeps, and
/// returns the sum. Throws CommError when the store does not answer within seconds.
int64_t count_ended_hosts(const std::string& address, uint16_t port, int amount);

}  // namespace lockstep::tool
