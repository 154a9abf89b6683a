#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::tool {

/// A subcommand: gets the words after its name, returns the exit code. Errors are thrown. The entry
/// point prints them and turns them into exit codes.
using Command = int (*)(const std::vector<std::string>& args);

// In the binary.
int run_command(const std::vector<std::string>& args);
using Commands = std::vector<std::pair<std::string, std::string>>;  ///< Name and help of each.
/// Prints the script for the shell that `args` names. At TAB the script asks this command what may
/// stand there, which it answers from the tables that the help pages are made from.
int completion_command(const std::vector<std::string>& args, const Commands& commands);
/// Runs a subcommand of a library: its name and what follows.
int run_from_library(const std::vector<std::string>& words);

// In liblockstep_cli.so.
int train_command(const std::vector<std::string>& args);
int eval_command(const std::vector<std::string>& args);
int estimate_memory_command(const std::vector<std::string>& args);
int debug_command(const std::vector<std::string>& args);
int checkpoint_command(const std::vector<std::string>& args);
int report_command(const std::vector<std::string>& args);
int env_command(const std::vector<std::string>& args);

}  // namespace lockstep::tool
