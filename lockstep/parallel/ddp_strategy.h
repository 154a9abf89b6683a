#pragma once

#include <memory>

#include "lockstep/parallel/ddp.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// Every rank has the whole model and the whole optimizer: DistributedDataParallel. A group of one
/// does without, to the same bits.
std::unique_ptr<Strategy> make_ddp_strategy(const StrategySetup& setup,
                                            const DdpOptions& options = {});

}  // namespace lockstep
