#pragma once

#include <string>
#include <vector>

namespace lockstep::tool {

/// `lockstep run`: gets the words after it, returns the exit code.
int run_command(const std::vector<std::string>& args);

}  // namespace lockstep::tool
