#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::tool {

/// The command that starts `command` as `ranks` ranks of mpirun on this host. They are not bound to
/// cores, as the other benchmarks' ranks are not, and may be more than there are cores. Throws
/// UsageError where there is no mpirun.
std::vector<std::string> under_mpirun(int64_t ranks, const std::vector<std::string>& command);

/// Throws UsageError when this process is itself one of several ranks of mpirun: a benchmark starts
/// its ranks itself.
void refuse_under_mpirun();

}  // namespace lockstep::tool
