#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/launch/host_agent.h"
#include "run_options.h"

namespace lockstep::tool {

/// By the path of a data file that is compressed: its content. See DatasetOptions::unpacked.
using UnpackedFiles = std::map<std::filesystem::path, std::span<const std::byte>>;

}  // namespace lockstep::tool

/// What the libraries beside the thin binary offer it. They are of the same build.
extern "C" {

/// In liblockstep_cli.so, which holds everything that needs LibTorch: the subcommands other than
/// `run` and `bench`. The subcommand's name comes first. Returns the exit code.
int lockstep_cli_main(const std::vector<std::string>& words,
                      const lockstep::tool::UnpackedFiles& unpacked);

/// In liblockstep_bench.so: `bench`, likewise.
int lockstep_bench_main(const std::vector<std::string>& words);

/// In liblockstep_cli.so: serves a TCPStore on a bound and listening socket, whose descriptor it
/// takes over, for as long as `store` lives. Throws CommError.
void lockstep_cli_host_store(int listen_fd, std::shared_ptr<void>& store);

/// In liblockstep_hosts.so: this host's part in a job of several. Throws UsageError for settings
/// that cannot be, CommError where the registry's port is taken.
void lockstep_hosts_join(const lockstep::tool::RunOptions& options,
                         std::shared_ptr<lockstep::launch::HostAgent>& agent);

}  // extern "C"
