#pragma once

#include <cstddef>
#include <cstdint>

/// What liblockstep_cli.so, which holds everything that needs LibTorch, offers to the thin binary
/// that loads it.
extern "C" {

/// The subcommands other than `run` and `bench`. argv[1] is the subcommand's name. Returns the exit
/// code.
int lockstep_cli_main(int argc, char** argv);

/// In liblockstep_bench.so: `bench`. The arguments and the result are those of lockstep_cli_main.
int lockstep_bench_main(int argc, char** argv);

/// The content of a data file, for the subcommand to come. It must live until
/// lockstep_cli_main has returned.
void lockstep_cli_offer_unpacked(const char* path, const void* content, size_t size);

/// Serves a TCPStore on a bound and listening socket, whose descriptor it takes over, until
/// lockstep_cli_release_store. Throws CommError.
void* lockstep_cli_host_store(int listen_fd);
void lockstep_cli_release_store(void* store);

/// In liblockstep_hosts.so: a launch::HostAgent for the RunOptions at `options`, until
/// lockstep_hosts_leave. Throws UsageError for settings that cannot be, CommError where the
/// registry's port is taken.
void* lockstep_hosts_join(const void* options);
void lockstep_hosts_leave(void* agent);

}  // extern "C"
