#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::tool {

using Commands = std::vector<std::pair<std::string, std::string>>;  ///< Name and help of each.

/// Prints the script for the shell that `args` names. At TAB the script asks this command what may
/// stand there, which it answers from the tables that the help pages are made from.
int completion_command(const std::vector<std::string>& args, const Commands& commands);

}  // namespace lockstep::tool
