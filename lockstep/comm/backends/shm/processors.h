#pragma once

#include <chrono>

namespace lockstep::shm {

/// Processors on which this process may run.
int usable_processors();

/// How long a wait looks for its peers before it sleeps, in a group of `ranks` on this host. Where
/// every rank has a processor: the time that sleeping and waking would cost. Where not: hardly, as
/// it keeps the processor from the one that is waited for.
std::chrono::nanoseconds spin_time(int ranks);

/// Whether a thread beside each rank's own has a processor as well.
bool has_spare_processors(int ranks);

}  // namespace lockstep::shm
