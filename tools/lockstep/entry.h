#pragma once

#include <cstddef>
#include <cstdint>

/// What liblockstep_cli.so, which holds everything that needs LibTorch, offers to the thin binary
/// that loads it. Nothing is thrown across.
extern "C" {

/// The subcommands other than `run`. argv[1] is the subcommand's name. Returns the exit code.
int lockstep_cli_main(int argc, char** argv);

/// Serves a TCPStore on a bound and listening socket, whose descriptor it takes over, until
/// lockstep_cli_release_store. Null on failure, with the reason in `error`.
void* lockstep_cli_host_store(int listen_fd, char* error, size_t error_size);
void lockstep_cli_release_store(void* store);

/// Adds to the number of hosts whose workers have ended, in the store at address and port. Returns
/// the sum; -1 on failure, with the reason in `error`.
int64_t lockstep_cli_ended_hosts(const char* address, uint16_t port, int amount, char* error,
                                 size_t error_size);

}  // extern "C"
