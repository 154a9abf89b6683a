#pragma once

#include <string>
#include <vector>

namespace lockstep::tool {

/// A subcommand: gets the words after its name, returns the exit code. Errors are thrown. The entry
/// point prints them and turns them into exit codes.
using Command = int (*)(const std::vector<std::string>& args);

int train_command(const std::vector<std::string>& args);
int eval_command(const std::vector<std::string>& args);
int estimate_memory_command(const std::vector<std::string>& args);
int debug_command(const std::vector<std::string>& args);
int checkpoint_command(const std::vector<std::string>& args);
int report_command(const std::vector<std::string>& args);
int env_command(const std::vector<std::string>& args);

}  // namespace lockstep::tool
