#pragma once

#include <memory>

#include "lockstep/parallel/strategy.h"

namespace lockstep {

/// Each rank has some consecutive layers of the model, a stage, and only their parameters,
/// gradients and optimizer state. A batch goes through the stages in micro-batches, by the schedule
/// of `options.pipeline_schedule`. With a mesh "dp=N,pp=M" there are N such pipelines, whose
/// gradients are averaged.
///
/// - Needs `setup.layers`, and of each BatchWork `input`, `target` and `criterion`. `criterion` is
///   called on the rank of the last stage only, once for each micro-batch, in their order.
/// - Losses and gradients are those of one process that accumulates the same micro-batches, to the
///   last bit. Only tied parameters (one tensor in layers of several stages) are summed in another
///   order: over each stage first, then over the stages.
/// - Each batch is cut into `options.num_micro_batches` equal parts. A batch smaller than the first
///   one, as at the end of an epoch, may be cut unevenly or into fewer parts. Its parts then weigh
///   as many samples as they have. So may the first batch after load_optimizer_state, which may be
///   the last of an epoch.
/// - Parameters of other ranks' stages give their memory back and are NaN from then on. Models are
///   saved by `model_state`.
/// - Layers must give one tensor whose shape depends on the input's shape alone.
///
/// A collective of `setup.group`. Throws UsageError for what cannot be: no layers, more stages than
/// layers, a mesh with other dimensions than dp and pp, a plan that names no layer, a parameter in
/// no layer. Throws MismatchError where the ranks' modules differ.
std::unique_ptr<Strategy> make_pipeline_strategy(const StrategySetup& setup);

/// Its data_share(), from the mesh alone: all ranks of one pipeline share the data. Throws as
/// above.
DataShare pipeline_data_share(const StrategyOptions& options, int rank, int size);

}  // namespace lockstep
