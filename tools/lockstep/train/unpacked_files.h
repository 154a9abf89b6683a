#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>

namespace lockstep::tool {

/// DatasetOptions::unpacked of this process: what the thin binary has unpacked while it loaded this
/// library. Filled before a subcommand runs, and only read then.
std::map<std::filesystem::path, std::span<const std::byte>>& unpacked_files();

}  // namespace lockstep::tool
