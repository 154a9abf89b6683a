#pragma once

#include <string>

#include "lockstep/launch/start.h"

namespace lockstep::launch {

/// What `start` does before `init`, for the function called `name`: returns in a rank only. With
/// `recovers` ranks may go on without one that fails (SpawnCall).
void start_ranks(int nprocs, const StartOptions& options, const std::string& name, bool recovers);

/// StartOptions::seed, once the world has formed. Collective.
void seed_ranks(const World& world, const StartOptions& options);

}  // namespace lockstep::launch
