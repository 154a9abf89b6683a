#pragma once

#include <string>
#include <vector>

namespace lockstep::tool {

/// Runs a subcommand that lives in liblockstep_cli.so: its name and what follows. Returns its exit
/// code.
int run_from_library(const std::vector<std::string>& words);

}  // namespace lockstep::tool
