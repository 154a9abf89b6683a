#pragma once

#include <memory>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// DataParallel as a strategy: one process, whose replicas each take a part of every batch. The
/// criterion sees the gathered output, so a mean is that of the whole batch. One process only, and
/// batches with `input`, `target` and `criterion`: UsageError otherwise. The module must have a
/// `clone`, and the setup a `forward`. With one replica the module itself runs, as with ddp.
std::unique_ptr<Strategy> make_dp_strategy(const StrategySetup& setup);

}  // namespace lockstep
