#pragma once

namespace lockstep::launch {

/// Where a worker writes its own account of its failure.
inline constexpr const char* kErrorFileVariable = "TORCHELASTIC_ERROR_FILE";
/// Random text in the environment of every worker of one job, inherited by its descendants: by it
/// the launcher and its keeper find those that have left the worker's process group and session.
inline constexpr const char* kTokenVariable = "LOCKSTEP_RUN_TOKEN";
/// Set in workers of `lockstep::spawn` to the number of the process that spawned them.
inline constexpr const char* kSpawnVariable = "LOCKSTEP_SPAWNED_BY";

}  // namespace lockstep::launch
