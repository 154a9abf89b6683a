#pragma once

#include <memory>

#include "lockstep/parallel/fsdp/fsdp_options.h"
#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// Parameters, gradients and the optimizer's state in shards: FullyShardedDataParallel.
/// `setup.options` wins over `options` where both say something.
///
/// Each batch's gradients are reduced when its backward runs, also while they only add up: whole
/// gradients are never kept. So with several batches per step the sum has another order than with
/// ddp. With one batch per step the bits are those of ddp, as FullyShardedDataParallel says.
std::unique_ptr<Strategy> make_fsdp_strategy(const StrategySetup& setup,
                                             const FsdpOptions& options = {});

}  // namespace lockstep
