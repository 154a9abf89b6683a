#pragma once

#include <memory>

namespace lockstep::tool {

/// Runs a subcommand that lives in liblockstep_cli.so. Returns its exit code.
int run_from_library(int argc, char** argv);

/// Serves a TCPStore on a bound and listening socket, whose descriptor it takes over, for as long
/// as the returned pointer lives. Loads LibTorch for it (0.2 s). Throws lockstep::Error.
std::shared_ptr<void> serve_store(int listen_fd);

}  // namespace lockstep::tool
