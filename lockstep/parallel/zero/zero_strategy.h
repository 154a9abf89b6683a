#pragma once

#include <memory>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// "zero1": stage 1 of ZeRO (Rajbhandari et al. 2020). As ddp, but each rank keeps the optimizer's
/// state of its part of the parameters only (see ZeroRedundancyOptimizer). For float32 and Adam a
/// rank keeps 8P + 8P/N bytes in place of 16P, where P counts parameters and N ranks.
///
/// The parameters get ddp's bits. StrategyOptions::reduce_dtype may be float16 or bfloat16. Then
/// gradients are averaged in it, as by DDP's hooks fp16_compress and bf16_compress. The module's
/// parameters move to other memory.
std::unique_ptr<Strategy> make_zero1_strategy(const StrategySetup& setup);

/// "zero2": stage 2. A rank also keeps the gradients of its part only: 4P + 12P/N bytes. Whole
/// gradients are reduced, part by part to their ranks, and given up, while backward runs. Batches
/// whose gradients only add up keep whole ones until the last batch of the step.
///
/// The parameters get ddp's bits over shared memory, and for two ranks over any backend. Other sums
/// of three or more ranks add in another order than ddp's. clip_grad_norm has a norm that differs
/// from ddp's by rounding. Every parameter must get a gradient, as with ddp. An optimizer that is
/// not elementwise gets whole parameters. StrategyOptions::reduce_dtype may be any floating-point
/// dtype.
std::unique_ptr<Strategy> make_zero2_strategy(const StrategySetup& setup);

}  // namespace lockstep
