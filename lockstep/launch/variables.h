#pragma once

namespace lockstep::launch {

/// Where a worker writes its own account of its failure.
inline constexpr const char* kErrorFileVariable = "TORCHELASTIC_ERROR_FILE";
/// Random text in the environment of every worker and so of its descendants. It is the mark of our
/// launcher, and a way to find what a job has started.
inline constexpr const char* kTokenVariable = "LOCKSTEP_RUN_TOKEN";
/// "1" beside an OMP_NUM_THREADS that our launcher has set because nobody else had. A program that
/// knows better how many threads it wants need not keep to it.
inline constexpr const char* kThreadsByLauncherVariable = "LOCKSTEP_THREADS_BY_LAUNCHER";
/// Set in workers of `lockstep::spawn` to the number of the process that spawned them.
inline constexpr const char* kSpawnVariable = "LOCKSTEP_SPAWNED_BY";
/// Beside it: to which call of `spawn` in the program the worker belongs, from 1.
inline constexpr const char* kSpawnCallVariable = "LOCKSTEP_SPAWN_CALL";

}  // namespace lockstep::launch
