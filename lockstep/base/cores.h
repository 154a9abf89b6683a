#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace lockstep {

/// Processors that the calling thread may run on, by their numbers in /proc/cpuinfo, ascending.
/// They are what taskset, a launcher or a container's cpuset leaves of the machine's. Threads
/// inherit it. On a machine of more than 1,024 it gives all, and set_allowed_processors fails.
std::vector<int> allowed_processors();
/// Lets the calling thread run on these only. Throws SystemError.
void set_allowed_processors(const std::vector<int>& processors);

/// Processors of the machine that are switched on.
int online_processors();

/// The time of how many processors the process may use. It is the least of the quotas of its cgroup
/// and those above it (cpu.max in version 2, cpu.cfs_quota_us in version 1). None: no limit. The
/// arguments are for tests.
std::optional<double> processor_quota(
    const std::filesystem::path& proc_cgroup = "/proc/self/cgroup",
    const std::filesystem::path& cgroups = "/sys/fs/cgroup");

/// The processors by the core that they belong to, as its hardware threads, cores in the order of
/// their first one. Each is its own where the kernel does not say. `system` is for tests.
std::vector<std::vector<int>> cores_of(
    const std::vector<int>& processors,
    const std::filesystem::path& system = "/sys/devices/system/cpu");

/// How many threads can compute at once without sharing a core: the cores of allowed_processors(),
/// within the quota.
int usable_cores();

/// How many threads can compute at once: allowed_processors(), but no more than the quota's whole
/// processors. One thread more would be stopped for part of the time. At least 1.
int usable_processors();

/// The same of numbers.
int usable_processors(int allowed, std::optional<double> quota);

}  // namespace lockstep
