#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// Folders with the files of a controller ("cpu", "memory") for this process's cgroup and those
/// above it, in versions 1 and 2, from the root on. In a container the path may be the host's,
/// whose folders are not there: then the root is the container's own group. The arguments are for
/// tests.
std::vector<std::filesystem::path> cgroup_folders(
    const std::string& controller, const std::filesystem::path& proc_cgroup = "/proc/self/cgroup",
    const std::filesystem::path& cgroups = "/sys/fs/cgroup");

/// What these cgroups say of memory.
struct MemoryUse {
  int64_t kills = 0;                  ///< Processes that the kernel has killed for want of it.
  std::optional<int64_t> limit = {};  ///< The least, in bytes; none: no limit.
  std::optional<int64_t> peak = {};   ///< Of the group with that limit.
};
MemoryUse memory_use(const std::vector<std::filesystem::path>& folders = cgroup_folders("memory"));

}  // namespace lockstep
